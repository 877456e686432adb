"""The parameters of a stage: letting go of all others, keeping copies equal, and putting the module together again.

The module tree stays whole. A parameter that a rank does not hold is ``None`` in its owner, which PyTorch skips in
``parameters()``, ``state_dict()`` and ``zero_grad()``, so that names, types and lengths are what the user wrote.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_effi.comm.gather import gather_full
from lightning_effi.comm.groups import group_of
from lightning_effi.comm.ranks import RankWords
from lightning_effi.compat import dtensor as dtensor_compat
from lightning_effi.context import Group
from lightning_effi.data_parallel.optimizers import DetachedOptimizers
from lightning_effi.pipeline_parallel.common import CommonState
from lightning_effi.pipeline_parallel.other_stages import AllParameters, OnAnotherStage, OtherStages
from lightning_effi.pipeline_parallel.planning.plan import PipelinePlan


class StageParameters:
    """Which parameters this rank holds, and those that other ranks hold too.

    Args:
        module: whole; cut down to this stage in place.
        plan: of the pipeline.
        stage: of this rank.
        group: the ranks of this pipeline, in the order of stages.
        pipelines: global ranks of all pipelines of the run, each in the order of stages.
        optimizers: of the whole module; those of this stage are left.
        words: tells whether a hook of the module is running.
        timeout: of messages between stages that share parameters.

    Attributes:
        blocks: names of the blocks that this rank runs.
        modules: names of the blocks and of the units outside them.
        stage: of this rank.
        optimizer_names: for each optimizer and group, the names of all its parameters, in the order before the split.
    """

    def __init__(
        self,
        module: nn.Module,
        plan: PipelinePlan,
        stage: int,
        group: Group,
        pipelines: Sequence[Sequence[int]],
        optimizers: DetachedOptimizers,
        words: RankWords,
        timeout: timedelta,
    ) -> None:
        self._module = module
        self._group = group
        self.stage = stage
        self._ranks = dist.get_process_group_ranks(group.device)
        self.names = [name for name, _ in module.named_parameters()]
        self._shapes = {name: (p.shape, p.dtype, p.device, p.requires_grad) for name, p in module.named_parameters()}
        self._first_holder = {name: s for s, each in reversed(list(enumerate(plan.ranks))) for name in each.parameters}
        self.state_keys = list(module.state_dict())
        self._places: dict[str, list[tuple[nn.Module, str]]] = {name: [] for name in self.names}
        by_id = {id(parameter): name for name, parameter in module.named_parameters()}
        for submodule in module.modules():
            for key, parameter in submodule._parameters.items():
                if parameter is not None:
                    self._places[by_id[id(parameter)]].append((submodule, key))
        # a parameter that the traced step did not use is held by everybody, so that hooks and other steps find it
        unused = [name for name in self.names if name not in self._first_holder]
        mine = {*plan.ranks[stage].parameters, *unused}
        self.local = {name: p for name, p in module.named_parameters() if name in mine}
        self.shared = {name: held for name, held in plan.shared_by_ranks if stage in held}
        self._shared_groups = self._make_groups(plan, pipelines, timeout)
        self._counted_ids = {id(parameter) for parameter in self.counted()}
        self.blocks = plan.ranks[stage].blocks
        self.modules = (*self.blocks, *plan.ranks[stage].units)
        self.optimizer_names = optimizers.names
        optimizers.keep(self.local)
        self._stand_ins = OtherStages(words)
        self._missing: dict[tuple[int, str], OnAnotherStage] = {}
        for name in self.names:
            if name not in mine:
                self._put(name, None)
        self._list_stand_ins()
        self.common = CommonState(module, unused, self.first_holder, self._stand_ins, group)

    def counts(self, parameter: Tensor) -> bool:
        """Whether this rank is the one to count the parameter in a norm: copies count once."""
        return id(parameter) in self._counted_ids

    def counted(self) -> list[nn.Parameter]:
        """The parameters of this stage that no earlier one holds, too."""
        return [p for name, p in self.local.items() if self.is_first_holder(name)]

    def is_first_holder(self, name: str) -> bool:
        """Whether no earlier stage holds the parameter."""
        return self._first_holder.get(name, 0) == self.stage

    def saves(self) -> Callable[[str], bool]:
        """Tells whether this stage is the one to save the parameter or buffer of a name; every rank must call this.

        Raises:
            RuntimeError: on all ranks, where stages hold different values of what none of them owns.
        """
        sources = self.common.sources(self.state_keys)
        return lambda name: sources.get(name, self.first_holder(name)) == self.stage

    @property
    def owned(self) -> Iterable[str]:
        """Names of the parameters that belong to some of the stages; the others are held by all."""
        return self._first_holder

    def first_holder(self, name: str) -> int:
        """The first stage that holds the parameter."""
        return self._first_holder.get(name, 0)

    def parameter_behind(self, tensor: Tensor) -> str | None:
        """The parameter of another stage that hooks have paired ``tensor`` with, or computed it from."""
        if isinstance(tensor, OnAnotherStage):
            return min(tensor.names)
        return self._stand_ins.parameter_behind(tensor)

    def in_place_of(self, names: Container[str]) -> dict[int, str]:
        """The names of these parameters by the identities of what stands in their places on this rank."""
        return {
            id(getattr(owner, key)): name
            for name, places in self._places.items()
            if name in names
            for owner, key in places
        }

    def add_up_shared(self) -> None:
        """Sum the gradients of parameters that several stages hold; every rank of the pipeline must call this.

        Ranks that hold the same shard of different copies add up their shards.
        """
        for held, (group, names) in self._shared_groups.items():
            if self.stage in held:
                sum_gradients([self.local[name] for name in names if self.local[name].requires_grad], group.device)

    def follow(self, module: nn.Module) -> None:
        """Take note of the parameters that sharding, or its end, has put in the places of those before."""
        self.local = {name: module.get_parameter(name) for name in self.local}
        self._counted_ids = {id(parameter) for parameter in self.counted()}

    def make_whole(self) -> None:
        """Bring every parameter to every rank, and put it back in its places."""
        self.common.spread(dict(enumerate(self._ranks)))
        for name in self.names:
            shape, dtype, device, requires_grad = self._shapes[name]
            parameter = self.local.get(name)
            if parameter is None:
                parameter = nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad)
            parameter.data = parameter.data.to(device)
            dist.broadcast(parameter.detach(), self._ranks[self._first_holder.get(name, 0)], group=self._group.device)
            self._put(name, parameter)
        self.hide_stand_ins()

    def return_to_optimizers(self, optimizers: Iterable[Optimizer]) -> None:
        """Give the optimizers all their parameters and states, once the module is whole again."""
        for optimizer, groups in zip(optimizers, self.optimizer_names, strict=True):
            held = {name: optimizer.state[p] for name, p in self.local.items() if p in optimizer.state}
            mine = gather_full(held, keep=True)  # data parallelism may have left them in shards
            everybodys: list[Any] = [None] * len(self._ranks)
            dist.all_gather_object(everybodys, mine, group=self._group.control)
            states = {name: state for each in reversed(everybodys) for name, state in each.items()} | mine
            optimizer.state.clear()
            for group, wanted in zip(optimizer.param_groups, groups, strict=True):
                group["params"] = [self._module.get_parameter(name) for name in wanted]
                for name, parameter in zip(wanted, group["params"], strict=True):
                    if name in states:
                        optimizer.state[parameter] = _on_device(states[name], parameter.device)

    def _put(self, name: str, parameter: nn.Parameter | None) -> None:
        """Code asks for ``weight.dtype`` or ``.device``: in place of a missing parameter it finds a tensor that knows
        both, takes no memory, and is full of NaN.
        """
        shape, dtype, device, requires_grad = self._shapes[name]
        like = torch.empty((), dtype=dtype, device=device).expand(shape)
        stand_in = self._stand_ins.parameter(name, like, requires_grad)
        for owner, key in self._places[name]:
            owner._parameters[key] = parameter
            if parameter is None:
                owner.__dict__[key] = self._missing[id(owner), key] = stand_in
            else:
                owner.__dict__.pop(key, None)

    def _list_stand_ins(self) -> None:
        """Let ``parameters()`` of all modules that have some list them in hooks."""
        for module in self._module.modules():
            if any((id(below), key) in self._missing for below in module.modules() for key in below._parameters):
                module.__dict__["parameters"] = AllParameters(module, self._stand_ins, self._missing)

    def hide_stand_ins(self) -> None:
        """Let ``parameters()`` list this stage's alone again."""
        for module in self._module.modules():
            module.__dict__.pop("parameters", None)

    def _make_groups(
        self, plan: PipelinePlan, pipelines: Sequence[Sequence[int]], timeout: timedelta
    ) -> dict[tuple[int, ...], tuple[Group, list[str]]]:
        """One group for each set of stages that share parameters; every rank of the run makes all of them."""
        by_holders: dict[tuple[int, ...], list[str]] = {}
        for name, held in plan.shared_by_ranks:
            by_holders.setdefault(held, []).append(name)
        groups: dict[tuple[int, ...], tuple[Group, list[str]]] = {}
        for held, names in by_holders.items():
            if len(held) == len(self._ranks):
                groups[held] = (self._group, names)
                continue
            for ranks in pipelines:
                made = group_of([ranks[stage] for stage in held], timeout)
                if ranks[self.stage] == self._ranks[self.stage]:
                    groups[held] = (Group(made, made), names)
        return groups

    @property
    def bytes(self) -> int:
        """Of all parameters of the whole module."""
        return sum(shape.numel() * dtype.itemsize for shape, dtype, _, _ in self._shapes.values())

    def reduce(self, value: Tensor, operation: Any) -> Tensor:
        """A number that each stage has a part of (a norm), put together over the pipeline."""
        value = value.to(next(iter(self._shapes.values()))[2])  # a stage without gradients has it on the CPU
        dist.all_reduce(value, operation, group=self._group.device)
        return value

    def gather(self, value: Any) -> list[Any]:
        """Everybody's ``value``, in the order of stages, on the first stage; an empty list elsewhere."""
        gathered: list[Any] | None = [None] * len(self._ranks) if self.stage == 0 else None
        dist.gather_object(value, gathered, dst=self._ranks[0], group=self._group.control)
        return gathered or []

    def gather_everywhere(self, value: Any) -> list[Any]:
        """Everybody's ``value``, in the order of stages."""
        gathered: list[Any] = [None] * len(self._ranks)
        dist.all_gather_object(gathered, value, group=self._group.control)
        return gathered

    def bring_to_first(self, sources: Mapping[Any, int], tensor_of: Callable[[Any], Tensor]) -> dict[Any, Tensor]:
        """Tensors of the stages given by key, on the first stage; nothing elsewhere."""
        mine = {key: tensor_of(key).detach().cpu() for key, stage in sources.items() if stage == self.stage}
        return {key: tensor for each in self.gather(mine) for key, tensor in each.items()}


def _on_device(state: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """An optimizer's state of one parameter; counts of steps (0-dim) stay where the optimizer keeps them."""
    return {
        key: value.to(device) if isinstance(value, Tensor) and value.dim() else value for key, value in state.items()
    }


@torch.no_grad()
def sum_gradients(parameters: Sequence[nn.Parameter], group: dist.ProcessGroup, divisor: int = 1) -> None:
    """Sum gradients over the ranks of ``group``, in one message for each dtype; a missing one counts as zeros.

    A parameter that no rank used keeps no gradient, or weight decay would move it.

    Args:
        parameters: the same ones on all ranks, plain or the same shards.
        group: whose gradients are summed.
        divisor: of the sums.
    """
    if dist.get_world_size(group) == 1 or not parameters:
        return
    used = torch.tensor([parameter.grad is not None for parameter in parameters], dtype=torch.uint8)
    used = used.to(dtensor_compat.local_tensor(parameters[0]).device)
    dist.all_reduce(used, dist.ReduceOp.MAX, group=group)
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for parameter, is_used in zip(parameters, used.tolist(), strict=True):
        if is_used:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            by_dtype.setdefault(parameter.dtype, []).append(dtensor_compat.local_tensor(parameter.grad))
    for gradients in by_dtype.values():
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        dist.all_reduce(flat, group=group)
        for gradient, part in zip(gradients, flat.div_(divisor).split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))
