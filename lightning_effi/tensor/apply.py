"""Carry out a tensor plan: exchange weights for DTensors, and let layers take and give split activations."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_effi.tensor.collectives import TensorGroup, share, take
from lightning_effi.tensor.linear import out_dim
from lightning_effi.tensor.plan import LayerPlan
from lightning_effi.tensor.split import CannotSplitError, Column, Split, SplitTensor, gathered, wrap

_SHARED = "_effi_shared"


class AppliedPlan:
    """Layers of ``root`` that work on parts; :meth:`undo` makes them ordinary again.

    Weights become DTensors on ``mesh`` (the ``tp`` axis), so that optimizers, clipping and checkpoints see global
    shapes and original rows. Two hooks a layer stand between whole and split activations: a column-wise layer's input
    is *shared* (one reduction of the input's gradient for all layers that read the same tensor), and what a row-wise
    layer is given whole by mistake is cut.
    """

    def __init__(self, root: nn.Module, layers: Sequence[LayerPlan], mesh: Any) -> None:
        self._root = root
        self._mesh = mesh
        self._group = TensorGroup(mesh.get_group(), mesh.get_local_rank(), mesh.size())
        self._handles: list[Any] = []
        self._parameters: list[tuple[nn.Module, str]] = []
        for layer in layers:
            self._apply(layer, root.get_submodule(layer.name))

    def _apply(self, layer: LayerPlan, module: Any) -> None:
        pre, post = module.register_forward_pre_hook, module.register_forward_hook
        if layer.style == "attention":
            self._split(module, "in_proj_weight", 0)
            self._split(module, "in_proj_bias", 0)
            self._split(module.out_proj, "weight", 1)
            column = Column(layer.name, layer.pieces)
            self._handles.append(pre(partial(_enter_attention, column, self._group), with_kwargs=True))
        elif layer.style == "row":
            self._split(module, "weight", 1 - out_dim(module))
            self._handles.append(pre(partial(_cut_input, self._group)))
        else:
            self._split(module, "weight", out_dim(module))
            self._split(module, "bias", 0)
            self._handles.append(pre(partial(_enter, Column(layer.name, layer.pieces), self._group)))
            if layer.style == "column_gather":
                self._handles.append(post(_gather_output))

    def _split(self, module: nn.Module, name: str, dim: int) -> None:
        from torch.distributed.tensor import Shard, distribute_tensor

        parameter = module._parameters.get(name)
        if parameter is None:
            return
        # every rank holds the same values, so each cuts its own part without communication
        part = distribute_tensor(parameter.detach(), self._mesh, [Shard(dim)], src_data_rank=None)
        module._parameters[name] = nn.Parameter(part, parameter.requires_grad)
        self._parameters.append((module, name))

    def undo(self) -> None:
        """Give every layer its whole weight back; all ranks must call this."""
        for handle in self._handles:
            handle.remove()
        for module, name in self._parameters:
            parameter: Any = module._parameters[name]
            if hasattr(parameter, "full_tensor"):
                whole = parameter.detach().full_tensor()
                module._parameters[name] = nn.Parameter(whole, parameter.requires_grad)


def _enter(column: Column, group: TensorGroup, _module: nn.Module, args: Any) -> Any:
    return (_shared(args[0], group, column), *args[1:])


def _enter_attention(column: Column, group: TensorGroup, _module: nn.Module, args: Any, kwargs: Any) -> Any:
    names = dict(zip(("query", "key", "value"), args, strict=False))
    given = {**kwargs, **names}
    entered = {key: _shared(given[key], group, column) for key in ("query", "key", "value")}
    return (entered["query"], entered["key"], entered["value"], *args[3:]), {
        key: value for key, value in kwargs.items() if key not in entered
    }


def _shared(tensor: Any, group: TensorGroup, column: Column) -> SplitTensor:
    """``tensor`` as the input of a column-wise layer; the same object for each layer that reads it."""
    if isinstance(tensor, SplitTensor):
        tensor = gathered(tensor)
    known = tensor.__dict__.get(_SHARED)
    entered = None if known is None else known()
    if entered is None or entered.requires_grad != (tensor.requires_grad and torch.is_grad_enabled()):
        entered = wrap(share(tensor, group), Split(group, None))
        tensor.__dict__[_SHARED] = weakref.ref(entered)
    entered.placement = replace(entered.placement, column=column)
    return entered


def _cut_input(group: TensorGroup, _module: nn.Module, args: Any) -> Any:
    tensor: Tensor = args[0]
    if isinstance(tensor, SplitTensor):
        return None
    dim, pieces = tensor.dim() - 1, (tensor.shape[-1],)
    return (wrap(take(tensor, dim, pieces, group), Split(group, dim, pieces)), *args[1:])


def _gather_output(_module: nn.Module, _args: Any, output: Any) -> Tensor:
    if not isinstance(output, SplitTensor):
        raise CannotSplitError("a column-wise layer returned nothing split")
    return gathered(output)  # type: ignore[no-any-return]
