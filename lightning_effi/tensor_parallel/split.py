"""A tensor of which each rank of a group holds a part, but which shows the shape of the whole.

Module code is written for whole tensors: ``view(batch, length, self.heads, -1)``, ``split(self.width, dim=2)``,
``reshape(*x.shape[:2], width)``. Between a column-wise and a row-wise layer activations are :class:`SplitTensor`: an
ordinary tensor with this rank's values that knows which dim is split, answers ``shape`` for the whole and translates
sizes. What no rule covers runs on the gathered whole, so that an operator nobody thought of costs time and not
correctness. No torch function is patched: ``__torch_function__`` only sees calls that get such a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from lightning_effi.compat import torch as torch_compat
from lightning_effi.tensor_parallel.collectives import TensorGroup, exchange, gather, share, take


class CannotSplitError(ValueError):
    """A split tensor is used in a way that has no counterpart on parts. ``sources``: the layers it comes from."""

    def __init__(self, message: str, sources: frozenset[str] = frozenset()) -> None:
        super().__init__(message)
        self.sources = sources


@dataclass(frozen=True)
class Column:
    """What a column-wise layer does with the input it is given: its name, and how its output is packed.

    ``partial``: the row-wise layer inside the same module (attention's) leaves its sum to the module's exit.
    """

    name: str
    pieces: tuple[int, ...]
    is_head: bool = False
    """Whether its outputs are logits, which the module may use in any way."""
    partial: bool = False


@dataclass(frozen=True)
class Split:
    """Which part of the whole a tensor holds.

    Attributes:
        group: among whom the whole is split.
        dim: which dim is split; ``None`` for a replicated tensor inside a split computation, whose gradient is a
            part of the sum that ``share`` makes.
        pieces: sizes of the pieces that make up the dim, each of which is split by itself: ``(768, 768, 768)`` for
            packed query, key and value.
        sources: names of the column-wise layers that it was computed from.
        column: for the input of a column-wise layer, that layer.
        yields: what has no counterpart on parts gets the whole, instead of being refused: so for logits, which
            nobody has seen in a probe. Their parts may be of different sizes, see ``collectives.part_of``.
        partial: for the input of a row-wise layer: its output is left a summand (``dim`` is ``None``), which the
            layer's exit adds up. Nothing but the layer itself may see it.
    """

    group: TensorGroup
    dim: int | None
    pieces: tuple[int, ...] = ()
    sources: frozenset[str] = frozenset()
    column: Column | None = field(default=None, compare=False)
    yields: bool = False
    partial: bool = field(default=False, compare=False)

    @property
    def size(self) -> int:
        """Size of the split dim in the whole."""
        return sum(self.pieces)

    @property
    def is_even(self) -> bool:
        """Whether all ranks hold parts of one size."""
        return not any(piece % self.group.size for piece in self.pieces)

    @property
    def is_contiguous(self) -> bool:
        """Whether each rank holds one run of the split dim."""
        return len(self.pieces) == 1

    @property
    def outer(self) -> int:
        """How many equal pieces there are; 0 where they are not equal."""
        return len(self.pieces) if len(set(self.pieces)) == 1 else 0

    def at(self, dim: int, pieces: tuple[int, ...] | None = None) -> Split:
        """The same split in another dim."""
        return replace(self, dim=dim, pieces=self.pieces if pieces is None else pieces, column=None, partial=False)


class SplitTensor(Tensor):
    """See the module's docstring. Made by :func:`wrap`."""

    placement: Split

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        from lightning_effi.tensor_parallel.layers.multihead import COMPOSED
        from lightning_effi.tensor_parallel.rules import apply_rule

        composed = COMPOSED.get(getattr(func, "__name__", ""))
        if composed is not None and isinstance(args[0], SplitTensor) and args[0].placement.column is not None:
            return composed(*args, **(kwargs or {}))
        with torch_compat.without_subclass_dispatch():
            return apply_rule(func, args, dict(kwargs or {}))


def wrap(local: Tensor, split: Split) -> SplitTensor:
    """``local`` as this rank's part of the whole that ``split`` describes."""
    wrapped: SplitTensor = local.as_subclass(SplitTensor)
    wrapped.placement = split
    return wrapped


def whole_shape(tensor: Tensor) -> torch.Size:
    """The shape of the whole; of any tensor."""
    shape = list(tensor.shape)
    if isinstance(tensor, SplitTensor) and tensor.placement.dim is not None:
        shape[tensor.placement.dim] = tensor.placement.size
    return torch.Size(shape)


def split_tensors(*trees: Any) -> list[SplitTensor]:
    """All split tensors in nested arguments."""
    return [leaf for leaf in tree_flatten(trees)[0] if isinstance(leaf, SplitTensor)]


def gathered(tree: Any, where: Callable[[Split], bool] = lambda split: True) -> Any:
    """Replace each split tensor in ``tree`` (only those ``where`` this holds) by the whole."""

    def whole(leaf: Any) -> Any:
        if not isinstance(leaf, SplitTensor) or not where(leaf.placement):
            return leaf
        split = leaf.placement
        if split.dim is None:
            return leaf.as_subclass(Tensor)
        return gather(leaf.as_subclass(Tensor), split.dim, split.pieces, split.group)

    return tree_map(whole, tree)


def aligned(tensor: Tensor, split: Split, from_right: int) -> Tensor:
    """A replicated operand, fit to be combined with a split one whose split dim is the ``from_right``-th from the end.

    Where the operand has the size of the whole there, its part is taken; where it broadcasts, it is shared.
    """
    if isinstance(tensor, SplitTensor):
        return tensor
    position = tensor.dim() - from_right
    if hasattr(tensor, "device_mesh"):
        return _stored_part(tensor, split, position)
    if position >= 0 and tensor.shape[position] == split.size and split.size > 1:
        return take(tensor, position, split.pieces, split.group)
    return share(tensor, split.group)


def whole_weight(parameter: Any) -> Tensor:
    """A parameter that is stored in parts, for a computation that every rank does whole."""
    from torch.distributed.tensor import Replicate

    whole: Tensor = parameter.full_tensor(grad_placements=[Replicate()])
    return whole


def _stored_part(parameter: Any, split: Split, dim: int) -> Tensor:
    """What fits a split tensor of a parameter that is stored in parts: a bias that a layer's class adds by itself."""
    [placement] = parameter.placements
    if not placement.is_shard(dim) or parameter.shape[dim] != split.size:
        refuse_stored(parameter, split)
    local: Tensor = parameter.to_local()
    return local if split.is_contiguous else exchange(local, dim, split.pieces, split.group)


def refuse_stored(tensor: Any, split: Split) -> None:
    """Raise for a parameter that is stored in parts and used by something else than its layer."""
    if hasattr(tensor, "device_mesh"):
        raise CannotSplitError("a weight that is split is used outside its layer", split.sources)
