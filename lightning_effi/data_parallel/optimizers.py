"""Optimizers that the user built on the intact module, moved onto the sharded one.

``configure_optimizers`` sees full parameters under their own names, so that groups by name, type or number of dims
come out as written. Afterwards each parameter is exchanged for its shard.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_effi.compat import dtensor as dtensor_compat

# Optimizers whose update of an element depends on that element alone: stepping on the local shard is then the same
# arithmetic, without DTensor's dispatch. Exact types only, since a subclass may do anything.
ELEMENTWISE = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.Adamax,
    torch.optim.ASGD,
    torch.optim.Rprop,
)

_MOMENTS = {torch.optim.Adam: 2, torch.optim.AdamW: 2, torch.optim.NAdam: 2, torch.optim.RAdam: 2}


def moments(optimizers: Iterable[Optimizer]) -> int | None:
    """How many tensors of the parameter's shape the optimizers keep; ``None`` if that is not known for one of them."""
    counts: set[int | None] = set()
    for optimizer in optimizers:
        if type(optimizer) is torch.optim.SGD:
            counts.add(int(any(group["momentum"] for group in optimizer.param_groups)))
        else:
            counts.add(_MOMENTS.get(type(optimizer)))
    return counts.pop() if len(counts) == 1 else None


class DetachedOptimizers:
    """Optimizers without their parameters, while those are being sharded.

    Holding names instead of parameters lets the full tensors be freed block by block.

    Args:
        optimizers: as returned by ``configure_optimizers``; emptied by this call until :meth:`attach`.
        module: the module whose parameters they hold.

    Raises:
        ValueError: for a parameter that is not the module's.
    """

    def __init__(self, optimizers: Iterable[Optimizer], module: nn.Module) -> None:
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        self._groups: list[tuple[dict[str, Any], list[str]]] = []
        self._states: list[tuple[Any, dict[str, dict[str, Any]]]] = []
        optimizers = list(optimizers)
        seen: set[int] = set()
        _refuse_foreign(optimizers, module, names)
        for optimizer in _with_inner(optimizers):
            for group in optimizer.param_groups:
                if id(group) in seen:  # wrappers such as Lookahead share the groups of the optimizer inside
                    continue
                seen.add(id(group))
                self._groups.append((group, [names[id(p)] for p in group["params"]]))
                group["params"] = []
            if id(optimizer.state) not in seen:
                seen.add(id(optimizer.state))
                self._states.append(
                    (optimizer.state, {names[id(p)]: s for p, s in optimizer.state.items() if id(p) in names})
                )
                optimizer.state.clear()
        by_group = {id(group): found for group, found in self._groups}
        self.names = [[by_group[id(group)] for group in optimizer.param_groups] for optimizer in optimizers]
        """For each optimizer and group, the names of all its parameters."""

    def keep(self, held: Container[str]) -> None:
        """Forget the parameters that are not in ``held``, which other ranks go on with."""
        self._groups = [(group, [name for name in names if name in held]) for group, names in self._groups]
        self._states = [
            (state, {name: entries for name, entries in by_name.items() if name in held})
            for state, by_name in self._states
        ]

    def attach(self, module: nn.Module) -> None:
        """Give the optimizers the (now sharded) parameters of ``module``; state made at construction is sharded."""
        parameters = dict(module.named_parameters())
        for group, names in self._groups:
            group["params"] = [parameters[name] for name in names]
        for state, by_name in self._states:
            for name, entries in by_name.items():
                parameter = parameters[name]
                state[parameter] = {key: shard_like(value, parameter) for key, value in entries.items()}


class IntactOptimizers:
    """Optimizers as they are now, to be put back should sharding fail: attributes, parameters and states, by object."""

    def __init__(self, optimizers: Iterable[Optimizer]) -> None:
        every = list(_with_inner(optimizers))
        self._attributes = [(vars(optimizer), dict(vars(optimizer))) for optimizer in every]
        groups = [group for optimizer in every for group in optimizer.param_groups]
        self._groups = [(group, group["params"], list(group["params"])) for group in groups]
        self._states = [
            (optimizer.state, {p: dict(entries) for p, entries in optimizer.state.items()}) for optimizer in every
        ]

    def put_back(self) -> None:
        """Undo what has been done to them since; asks no other rank."""
        for held, attributes in self._attributes:
            for name in held.keys() - attributes.keys():
                del held[name]
            held.update(attributes)
        for group, parameters, kept in self._groups:
            parameters[:] = kept
            group["params"] = parameters
        for state, entries in self._states:
            state.clear()
            state.update(entries)


def _refuse_foreign(optimizers: Iterable[Optimizer], module: nn.Module, names: Container[int]) -> None:
    """Before any optimizer is emptied."""
    for optimizer in _with_inner(optimizers):
        foreign = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in names]
        if foreign:
            raise ValueError(
                f"{type(optimizer).__name__} holds a parameter of shape {tuple(foreign[0].shape)} that is not"
                f" one of {type(module).__name__}'s; only the module's own parameters can be sharded"
            )


def shard_like(value: Any, parameter: Tensor) -> Any:
    """Shard a full tensor of the parameter's shape as the parameter is; anything else is returned as it is."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    if not isinstance(parameter, DTensor) or not isinstance(value, Tensor) or isinstance(value, DTensor):
        return value
    if value.shape != parameter.shape:
        return value
    # src_data_rank=None: every rank holds the same full value, so each cuts its own part without communication
    return distribute_tensor(
        value.to(dtensor_compat.local_tensor(parameter).device),
        parameter.device_mesh,
        parameter.placements,
        src_data_rank=None,
    )


class LocalStep:
    """Lets an elementwise optimizer step on plain local shards instead of DTensors.

    Between steps ``param_groups`` and ``state`` hold DTensors as FSDP2 leaves them, so that hooks, clipping and
    checkpoints see global shapes. :meth:`enter` puts plain views of the local shards in their place, :meth:`exit`
    takes them out again and wraps new state of the shard's shape.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._locals: dict[int, nn.Parameter] = {}
        self._entered: list[tuple[dict[str, Any], list[nn.Parameter]]] | None = None
        self._wrapped: dict[int, dict[str, Any]] = {}

    @staticmethod
    def serves(optimizer: Optimizer) -> bool:
        """Whether the optimizer is known to work element by element."""
        return type(optimizer) in ELEMENTWISE

    def enter(self) -> None:
        """Called after gradients were clipped and right before the update."""
        self._entered = []
        state = self._optimizer.state
        for group in self._optimizer.param_groups:
            sharded = group["params"]
            self._entered.append((group, sharded))
            group["params"] = [self._local(parameter) for parameter in sharded]
            for parameter, local in zip(sharded, group["params"], strict=True):
                if local is not parameter and parameter in state:
                    entries = self._wrapped[id(parameter)] = state.pop(parameter)
                    state[local] = {key: dtensor_compat.local_tensor(v) for key, v in entries.items()}  # type: ignore[arg-type]

    def exit(self) -> None:
        """Called when the update is done, or has failed."""
        if self._entered is None:
            return
        state = self._optimizer.state
        for group, sharded in self._entered:
            for parameter, local in zip(sharded, group["params"], strict=True):
                if local is parameter:
                    continue
                local.grad = None
                if local in state:
                    wrapped = self._wrapped.get(id(parameter), {})
                    state[parameter] = {
                        key: self._wrap(value, wrapped.get(key), parameter, local)
                        for key, value in state.pop(local).items()
                    }
            group["params"] = sharded
        self._entered = None
        self._wrapped.clear()

    def _local(self, parameter: nn.Parameter) -> nn.Parameter:
        shard = dtensor_compat.local_tensor(parameter)
        if shard is parameter:
            return parameter
        local = self._locals.get(id(parameter))
        if local is None or local.data_ptr() != shard.data_ptr():
            local = nn.Parameter(shard, requires_grad=parameter.requires_grad)
            self._locals[id(parameter)] = local
        local.grad = None if parameter.grad is None else dtensor_compat.local_tensor(parameter.grad)
        return local

    @staticmethod
    def _wrap(value: Any, before: Any, parameter: Any, local: Tensor) -> Any:
        if isinstance(before, Tensor) and dtensor_compat.local_tensor(before) is value:
            return before  # updated in place, as moments are: its DTensor still stands
        if isinstance(value, Tensor) and value.dim() > 0 and value.shape == local.shape:
            return dtensor_compat.wrap_local(value, parameter)
        return value


def _with_inner(optimizers: Iterable[Optimizer]) -> Iterator[Optimizer]:
    """The optimizers, each followed by those it holds (Lookahead, SAM and the like)."""
    for optimizer in optimizers:
        yield optimizer
        yield from _with_inner(value for value in vars(optimizer).values() if isinstance(value, Optimizer))
