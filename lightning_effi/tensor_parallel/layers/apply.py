"""Carry out a tensor plan: exchange weights for DTensors, and let layers take and give split activations."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from lightning_effi.modules.parameters import attributes
from lightning_effi.sharded_tensors.stale_parameters import hand_over
from lightning_effi.tensor_parallel.collectives import TensorGroup, assemble, share, take
from lightning_effi.tensor_parallel.layers.linear import out_dim
from lightning_effi.tensor_parallel.layers.sequence import SequenceShards
from lightning_effi.tensor_parallel.planning.plan import LayerPlan, SequencePlan
from lightning_effi.tensor_parallel.split import (
    CannotSplitError,
    Column,
    Split,
    SplitTensor,
    gathered,
    whole_weight,
    wrap,
)


class AppliedPlan:
    """Layers of ``root`` that work on parts; :meth:`undo` makes them ordinary again.

    Weights become DTensors on ``mesh`` (the ``tp`` axis), so that optimizers, clipping and checkpoints see global
    shapes and original rows. Two hooks a layer stand between whole and split activations: a column-wise layer's input
    is *shared* (one reduction of the input's gradient for all layers that read the same tensor), and what a row-wise
    layer is given whole by mistake is cut. A table takes row numbers as they are, and a head gives logits in parts as
    long as there can be a backward.

    Args:
        root: the module whose layers are exchanged.
        layers: which ones, and how.
        mesh: the ``tp`` axis.
        sequence: the blocks between whose layers activations are split by sequence.
        handing_out: the blocks that return more of split layers than hidden states (attention weights, say), which
            is in parts, like logits, as long as there can be a backward.
        whole_outputs: whether blocks return wholes only.
    """

    def __init__(
        self,
        root: nn.Module,
        layers: Sequence[LayerPlan],
        mesh: Any,
        sequence: Sequence[SequencePlan] = (),
        handing_out: Sequence[str] = (),
        whole_outputs: bool = False,
    ) -> None:
        self._root = root
        self._mesh = mesh
        self.group = TensorGroup(mesh.get_group(), mesh.get_local_rank(), mesh.size())
        self._shards = SequenceShards(self.group)
        self._entrance = _Entrance(self.group, self._shards)
        self._handles: list[Any] = self._shards.apply(root, sequence)
        self._parameters: list[tuple[nn.Module, str]] = []
        self._places: dict[int, list[tuple[nn.Module, str]]] = {}
        for module in root.modules():
            for name, parameter in module._parameters.items():
                self._places.setdefault(id(parameter), []).append((module, name))
        for module, layer in {root.get_submodule(layer.name): layer for layer in layers}.items():
            self._apply(layer, module)
        hand_out = _hand_out_wholes if whole_outputs else _hand_out
        self._handles += [root.get_submodule(name).register_forward_hook(hand_out) for name in handing_out]

    def _apply(self, layer: LayerPlan, module: Any) -> None:
        pre, post = module.register_forward_pre_hook, module.register_forward_hook
        if layer.style == "attention":
            self._split(module, "in_proj_weight", 0)
            self._split(module, "in_proj_bias", 0)
            self._split(module.out_proj, "weight", 1)
            column = Column(layer.name, layer.pieces)
            self._handles.append(pre(partial(self._entrance.enter_attention, column), with_kwargs=True))
            self._handles.append(post(self._shards.sum_up))
        elif layer.style == "row":
            self._split(module, "weight", 1 - out_dim(module))
            self._handles.append(pre(self._entrance.leave))
            self._handles.append(post(self._shards.sum_up))
        elif isinstance(module, nn.Embedding):
            self._split(module, "weight", 0)
            self._handles.append(pre(partial(_enter_table, self.group), with_kwargs=True))
        elif layer.style == "vocab":
            self._split(module, "weight", out_dim(module))
            self._split(module, "bias", 0)
            head = Column(layer.name, layer.pieces, is_head=True)
            self._handles.append(pre(partial(_enter_head, self.group, head), with_kwargs=True))
            self._handles.append(post(_gather_without_gradients))
        else:
            self._split(module, "weight", out_dim(module))
            self._split(module, "bias", 0)
            self._handles.append(pre(partial(self._entrance.enter, Column(layer.name, layer.pieces))))
            if layer.style == "column_gather":
                self._handles.append(post(_gather_output))

    def _split(self, module: nn.Module, name: str, dim: int) -> None:
        from torch.distributed.tensor import Shard, distribute_tensor

        parameter = module._parameters.get(name)
        if parameter is None or hasattr(parameter, "device_mesh"):  # tied to one that was split before
            return
        # every rank holds the same values, so each cuts its own part without communication
        part = nn.Parameter(
            distribute_tensor(parameter.detach(), self._mesh, [Shard(dim)], src_data_rank=None),
            parameter.requires_grad,
        )
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise ValueError(
                f"a parameter '{name}' of shape {tuple(parameter.shape)} has a hook on its gradient, and tensor"
                " parallelism would show it one rank's part. Change the gradient in on_after_backward or"
                " on_before_optimizer_step, or keep the layer whole by TensorParallel(plan={'<name of the layer>':"
                " 'replicate'})"
            )
        part.__dict__.update(attributes(parameter))
        places = self._places.pop(id(parameter))
        for owner, key in places:
            owner._parameters[key] = part
        hand_over(parameter, module, name)
        self._parameters += places

    def begin_step(self) -> None:
        """A step hook of the module is about to run."""
        self._shards.begin_step()

    def undo(self) -> None:
        """Give every layer its whole weight back; all ranks must call this."""
        for handle in self._handles:
            handle.remove()
        wholes: dict[int, nn.Parameter] = {}  # one for all the places of a tied parameter
        for module, name in self._parameters:
            parameter: Any = module._parameters[name]
            if hasattr(parameter, "full_tensor"):
                if id(parameter) not in wholes:
                    whole = parameter.detach().full_tensor()
                    wholes[id(parameter)] = nn.Parameter(whole, parameter.requires_grad)
                    wholes[id(parameter)].__dict__.update(attributes(parameter))
                module._parameters[name] = wholes[id(parameter)]


class _Entrance:
    """Turns whole activations into inputs of column-wise layers.

    Query, key and value read one tensor: it is shared once, so that its gradient is summed over the ranks once. The
    last one is remembered until a row-wise layer ends the split region.
    """

    def __init__(self, group: TensorGroup, shards: SequenceShards) -> None:
        self._group = group
        self._shards = shards
        self._last: tuple[weakref.ref[Tensor], SplitTensor] | None = None

    def __deepcopy__(self, memo: Any) -> _Entrance:
        return _Entrance(self._group, copy.deepcopy(self._shards, memo))

    def enter(self, column: Column, _module: nn.Module, args: Any) -> Any:
        """Pre-hook of a column-wise layer."""
        return (self._shared(args[0], column), *args[1:])

    def enter_attention(self, column: Column, _module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Pre-hook of ``nn.MultiheadAttention``."""
        names = ("query", "key", "value")
        column = replace(column, partial=self._shards.is_active)
        given = {**kwargs, **dict(zip(names, args, strict=False))}
        entered = tuple(self._shared(given[name], column) for name in names)
        self._last = None
        return (*entered, *args[3:]), {key: value for key, value in kwargs.items() if key not in names}

    def leave(self, module: nn.Module, args: Any) -> Any:
        """Pre-hook of a row-wise layer: what is whole by now (after a gathering) is cut again."""
        self._last = None
        tensor: Tensor = args[0]
        # a class of its own may do more than the product, and nothing else knows what to do with a summand
        partial = self._shards.is_active and type(module).__name__ in ("Linear", "Conv1D")
        if isinstance(tensor, SplitTensor):
            if not partial or tensor.placement.dim != tensor.dim() - 1:
                return None
            return (wrap(tensor.as_subclass(Tensor), replace(tensor.placement, partial=True)), *args[1:])
        dim, pieces = tensor.dim() - 1, (tensor.shape[-1],)
        split = Split(self._group, dim, pieces, partial=partial)
        return (wrap(take(tensor, dim, pieces, self._group), split), *args[1:])

    def _shared(self, tensor: Any, column: Column) -> SplitTensor:
        requires_grad = tensor.requires_grad and torch.is_grad_enabled()
        if self._last is not None and self._last[0]() is tensor and self._last[1].requires_grad == requires_grad:
            entered = self._last[1]
        else:
            entered = wrap(self._in_common(tensor), Split(self._group, None))
            self._last = (weakref.ref(tensor), entered)
        entered.placement = replace(entered.placement, column=column)
        return entered

    def _in_common(self, tensor: Tensor) -> Tensor:
        if hasattr(tensor, "device_mesh"):  # a table of relative positions is handed to the blocks itself
            return share(whole_weight(tensor), self._group)
        if not isinstance(tensor, SplitTensor) or tensor.placement.dim is None:
            return share(tensor.as_subclass(Tensor), self._group)
        split = tensor.placement
        return assemble(tensor.as_subclass(Tensor), tensor.placement.dim, split.pieces, self._group)


def _enter_table(group: TensorGroup, _module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Pre-hook of an embedding: marks the row numbers, so that the lookup finds its rule."""

    def marked(tokens: Any) -> Any:
        # a class of its own may be called with something else (the shape of a batch) and make row numbers of it
        is_row_numbers = isinstance(tokens, Tensor) and not tokens.is_floating_point()
        return wrap(gathered(tokens), Split(group, None)) if is_row_numbers else tokens

    return _with_input(args, kwargs, marked)


def _enter_head(group: TensorGroup, head: Column, _module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Pre-hook of an output layer."""
    return _with_input(
        args, kwargs, lambda hidden: wrap(share(gathered(hidden), group), Split(group, None, column=head))
    )


def _with_input(args: Any, kwargs: Any, change: Callable[[Any], Any]) -> Any:
    if args:
        return (change(args[0]), *args[1:]), kwargs
    return args, {key: change(value) if key == "input" else value for key, value in kwargs.items()}


def _gather_without_gradients(_module: nn.Module, _args: Any, output: Any) -> Any:
    """Evaluation looks at logits in every way, often on one rank alone, and has no backward that would keep them."""
    return output if torch.is_grad_enabled() else gathered(output)


def _hand_out(_block: nn.Module, _args: Any, output: Any) -> Any:
    """Hook of a block. No probe has seen what becomes of its outputs, so that parts give way to the whole there."""
    if not torch.is_grad_enabled():
        return _hand_out_wholes(_block, _args, output)

    def yielding(leaf: Any) -> Any:
        if not isinstance(leaf, SplitTensor) or not leaf.placement.sources:
            return leaf
        return wrap(leaf.as_subclass(Tensor), replace(leaf.placement, yields=True))

    return tree_map(yielding, output)


def _hand_out_wholes(_block: nn.Module, _args: Any, output: Any) -> Any:
    return gathered(output, where=lambda split: bool(split.sources))


def _gather_output(_module: nn.Module, _args: Any, output: Any) -> Tensor:
    if not isinstance(output, SplitTensor):
        raise CannotSplitError("a column-wise layer returned nothing split")
    return gathered(output)  # type: ignore[no-any-return]
