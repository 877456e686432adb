"""Weights that are split, in computations outside their layers: ``x @ self.embedding.weight.T``, penalties, products.

Inside its layer a split weight meets activations that know of the split. Elsewhere it is a DTensor among plain tensors,
which torch refuses to mix. Lookups and products with such a weight run on parts, as they do in a layer; everything else
is given the whole weight, whose gradient is complete on every rank, as that of all that is computed from it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from lightning_effi.sharded_tensors.names import is_in_place
from lightning_effi.sharded_tensors.stale_parameters import EarlierParameter, resolved
from lightning_effi.tensor_parallel.collectives import TensorGroup, share
from lightning_effi.tensor_parallel.rules.vocabulary import embedded
from lightning_effi.tensor_parallel.split import Column, Split, SplitTensor, gathered, whole_weight, wrap

_LAYERS = frozenset({"linear", "addmm", "embedding", "multi_head_attention_forward"})
_PRODUCTS = frozenset({"matmul", "__matmul__", "mm"})
_REARRANGEMENTS = frozenset(
    {"__getitem__", "select", "narrow", "split", "chunk", "tensor_split", "split_with_sizes", "unbind", "index_select",
     "gather", "take_along_dim", "flip", "roll", "view", "reshape", "flatten", "unflatten", "expand", "expand_as",
     "repeat", "tile", "repeat_interleave", "diagonal", "tril", "triu"}
)  # fmt: skip


class WeightsOutsideLayers(TorchFunctionMode):
    """Inside, a weight that tensor parallelism splits may be used by any torch function.

    Attributes:
        was_needed: whether that has happened.
    """

    def __init__(self, group: TensorGroup) -> None:
        super().__init__()
        self.was_needed = False
        self._group = group

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if EarlierParameter in types:
            args, kwargs = resolved(args, kwargs)
        name = getattr(func, "__name__", "")
        # a DTensor that is cut up or rearranged by itself gets a gradient that is laid out otherwise than it
        if not (mixes(name, args, kwargs) or (name in _REARRANGEMENTS and _is_stored(args[0] if args else None))):
            return func(*args, **kwargs)
        self.was_needed = True
        if name == "embedding" and _is_split(args[1:2], 0) and len(args) <= 3 and not kwargs.keys() - {"padding_idx"}:
            padding = args[2] if len(args) > 2 else kwargs.get("padding_idx")
            return embedded(args[0], args[1], padding, self._group)
        if name == "linear" and _is_split(args[1:2], 0) and not kwargs.keys() - {"bias"}:
            return self._product(args[0], args[1], args[2] if len(args) > 2 else kwargs.get("bias"))
        if name in _PRODUCTS and not kwargs and _is_split(args[1:2], 1) and args[0].dim() > 1:
            return self._product(args[0], args[1].t(), None)
        return func(*tree_map(_whole, args), **tree_map(_whole, kwargs))

    def _product(self, tensor: Tensor, weight: Any, bias: Any) -> Any:
        """As an output head: in parts as long as there can be a backward."""
        column = Column("a weight used outside its layer", (weight.shape[0],), is_head=True)
        entered = wrap(share(tensor, self._group), Split(self._group, None, column=column))
        output = F.linear(entered, weight, bias)
        return output if torch.is_grad_enabled() else gathered(output)


def mixes(name: str, args: Any, kwargs: Any) -> bool:
    """Whether a split weight meets other tensors in a function that no layer's rule covers."""
    stored = plain = False
    for value in _operands(args, kwargs):
        if isinstance(value, SplitTensor):
            if name in _LAYERS or not value.placement.yields:
                return False
            plain = True
        elif _is_stored(value):
            stored = True
        elif isinstance(value, Tensor):
            plain = True
    if not (stored and plain):
        return False
    # what is written to a whole copy would be lost; torch's own refusal is better
    return not (is_in_place(name) and any(_is_stored(target) for target in _operands(args[:1], {})))


def _operands(args: Any, kwargs: Any) -> Iterator[Any]:
    for value in (*args, *kwargs.values()):
        if isinstance(value, (list, tuple)):
            yield from value
        else:
            yield value


def _is_stored(value: Any) -> bool:
    """Whether this is a DTensor on the ``tp`` axis alone, as weights are while a step runs."""
    mesh = getattr(value, "device_mesh", None) if isinstance(value, Tensor) else None
    return mesh is not None and mesh.mesh_dim_names == ("tp",)


def _is_split(values: Any, dim: int) -> bool:
    return bool(values) and _is_stored(values[0]) and values[0].dim() == 2 and values[0].placements[0].is_shard(dim)


def _whole(value: Any) -> Any:
    return whole_weight(value) if _is_stored(value) else value
