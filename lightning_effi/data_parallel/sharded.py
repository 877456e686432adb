"""ZeRO stages 1-3: torch's FSDP2 around each block, with its gaps closed for modules that were not written for it."""

from __future__ import annotations

import os
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_effi.comm.agreement import Agreement
from lightning_effi.comm.broadcast import broadcast_states
from lightning_effi.compat import fsdp as fsdp_compat
from lightning_effi.data_parallel.buffers import BufferSync
from lightning_effi.data_parallel.copies import WholeCopies
from lightning_effi.data_parallel.engine import Engine, StepRoot
from lightning_effi.data_parallel.group import LiveGroup
from lightning_effi.data_parallel.optimizers import DetachedOptimizers
from lightning_effi.data_parallel.plan import ROOT, ShardingPlan
from lightning_effi.data_parallel.reduction import OrderedReduction
from lightning_effi.modules.deferred import DeferredValues
from lightning_effi.modules.parameters import attributes
from lightning_effi.modules.undo import Undo
from lightning_effi.sharded_tensors.functions import in_step, keep_gradient_hooks
from lightning_effi.sharded_tensors.mixed import WholeWhereMixed
from lightning_effi.sharded_tensors.stale_parameters import hand_over

_TOGGLES = ("toggle_optimizer", "untoggle_optimizer")


class ShardedEngine(Engine):
    """Shards a module by a plan and runs it.

    In stages 1 and 2 all parameters are gathered when a step begins, in one order on all ranks, so that the module
    may use them in any way: methods other than ``forward``, functional calls, penalties on ``self.parameters()``,
    branches that differ between ranks. In stage 3 a block's parameters are gathered when its ``forward`` is called.

    Args:
        module: the LightningModule, intact; sharded in place.
        plan: from :func:`~lightning_effi.data_parallel.plan.plan_sharding`.
        mesh: torch mesh with the axes ``replicate`` and ``shard``.
        data_parallel_group: all ranks that average gradients.
        control_group: the same ranks, with a backend for CPU tensors.
        device: where the shards live.
        sync_every_backward: reduce gradients in each backward of an accumulation window, or only in the last.
        processes_per_node: how many processes share this machine's memory.
        driven: several forwards are under way at a time, of which FSDP2's hooks know nothing (a pipeline stage): all
            parameters are gathered for a whole step in every stage, and gradients are reduced when it is over.
    """

    def __init__(
        self,
        module: nn.Module,
        plan: ShardingPlan,
        *,
        mesh: Any,
        data_parallel_group: dist.ProcessGroup,
        control_group: dist.ProcessGroup,
        device: torch.device,
        sync_every_backward: bool,
        processes_per_node: int,
        driven: bool = False,
    ) -> None:
        super().__init__(module)
        if fsdp_compat.groups(module):
            raise ValueError(
                f"{type(module).__name__} is still sharded by an earlier run, which ended in an error or whose weights"
                " did not fit into one process. Go on with that Trainer, or build the module anew and load a checkpoint"
            )
        self._plan = plan
        self._processes_per_node = processes_per_node
        self._driven = driven
        self._gather_all = plan.zero_stage < 3 or driven
        self._sync_every_backward = sync_every_backward
        self._in_step = False
        self._window_open = False
        self._keeps_unreduced = False
        self._awaits_reduction = False  # from a backward inside a window to the next step
        self._agreement = Agreement(control_group)
        self._trace: list[str] = []
        self._shards: dict[int, nn.Parameter] = {}
        self._whole = None if self._gather_all else WholeWhereMixed()

        _refuse_hooks(module, plan)
        self.root = StepRoot(module)
        self._shard(mesh, data_parallel_group, device)
        replicated = {info.name: module.get_parameter(info.name) for info in plan.replicated}
        self._groups = self._live_groups()
        self._buffers = BufferSync(module, data_parallel_group)
        self._reduction = OrderedReduction(
            self._groups, replicated, data_parallel_group, self._agreement, self._buffers
        )
        self._undo = Undo()
        self._watched: list[Optimizer] = []
        self._register_hooks()

    @property
    def is_sharded(self) -> bool:
        return True

    # -- set-up ------------------------------------------------------------------------------------------------------

    def _shard(self, mesh: Any, group: dist.ProcessGroup, device: torch.device) -> None:
        """Block by block: fill, move to the device, make equal to the first rank, shard. The root comes last."""
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        fsdp_mesh = mesh["shard"] if self._plan.layout.replicate == 1 else mesh["replicate", "shard"]
        # A root policy that casts would turn the batch's float targets into low precision.
        policy = MixedPrecisionPolicy(cast_forward_inputs=False)
        done: set[int] = set()
        classes: dict[type, type] = {}
        scalars = {self.module.get_parameter(info.name) for info in self._plan.replicated}
        values = DeferredValues(self.module)
        for name in [*(g.module for g in self._plan.groups if g.module != ROOT), ROOT]:
            unit = self.module.get_submodule(name)
            values.fill_through(unit)
            names = {id(parameter): name for name, parameter in self.module.named_parameters()}
            fresh = [t for t in [*unit.parameters(), *unit.buffers()] if id(t) not in done and not _is_dtensor(t)]
            moved = [t.data.to(device) for t in fresh]
            broadcast_states(moved, group)
            for tensor, ours in zip(fresh, moved, strict=True):
                tensor.data = ours
            # a block's part may have a name outside the block as well
            others = scalars | {p for p in unit.parameters() if id(p) in done}
            before = [p for p in unit.parameters() if p not in scalars and id(p) not in done]
            target = self.root if name == ROOT else unit
            reshard = not self._gather_all and name != ROOT
            fully_shard(target, mesh=fsdp_mesh, reshard_after_forward=reshard, mp_policy=policy, ignored_params=others)
            fsdp_compat.own_class(target, classes)
            done.update(id(buffer) for buffer in unit.buffers())
            for parameter in before:
                self._take_over(names[id(parameter)], parameter)
            done.update(id(parameter) for parameter in unit.parameters())

    def _take_over(self, name: str, before: nn.Parameter) -> None:
        """What user code noted on a parameter and whoever still holds it follow to the sharded one."""
        sharded = self.module.get_parameter(name)
        sharded.__dict__.update(attributes(before))
        if not _is_dtensor(before):
            hooks = before._backward_hooks
            keep_gradient_hooks(sharded, hooks if hooks is not None else OrderedDict())
            hand_over(before, self.module, name)

    def _live_groups(self) -> list[LiveGroup]:
        names = {id(parameter): name for name, parameter in self.module.named_parameters()}
        plans = {group.module: group for group in self._plan.groups}
        live = []
        for fsdp_group in fsdp_compat.groups(self.root):
            first = names[id(fsdp_compat.sharded_param(fsdp_compat.params(fsdp_group)[0]))]
            plan = next(p for p in plans.values() if any(info.name == first for info in p.parameters))
            regathers = not self._gather_all and plan.module != ROOT
            live.append(LiveGroup(plan, fsdp_group, self._plan.compute, self.module, regathers))
        fsdp_compat.initialize(self.root)
        if self._driven:
            fsdp_compat.take_off_hooks(self.root)
        return live

    def _register_hooks(self) -> None:
        handles: list[Any] = []
        by_name = {group.name: group for group in self._groups}
        self._root_group = by_name.get(ROOT)
        in_root = self._root_group.parameter_names if self._root_group is not None else []
        for owner in {ROOT, *(name.rpartition(".")[0] for name in in_root)}:
            hook = self.module.get_submodule(owner).register_forward_pre_hook(self._gather_outside_step)
            handles.append(hook)
        if not self._gather_all:
            for name in by_name.keys() - {ROOT}:
                hook = self.module.get_submodule(name).register_forward_pre_hook(partial(self._trace_call, name))
                handles.append(hook)
        for handle in handles:
            self._undo.push(handle.remove)
        self._shadow("zero_grad", partial(self._zero_grad, self.module.zero_grad))
        for name in _TOGGLES:
            toggle = getattr(self.module, name, None)
            if toggle is not None:
                self._shadow(name, partial(self._toggle, toggle))
        names = {*fsdp_compat.attribute_names(), "zero_grad", *_TOGGLES}
        hooks = {*fsdp_compat.hook_keys(self.root), *(handle.id for handle in handles)}
        self._undo.push(WholeCopies(self.module, names, hooks).remove)

    def _shadow(self, name: str, method: Callable[..., None]) -> None:
        """Let the module's ``name`` be ``method``, until this engine takes its changes back."""
        self.module.__dict__[name] = method
        self._undo.push(partial(self.module.__dict__.pop, name, None))

    def _zero_grad(self, zero_grad: Callable[..., None], set_to_none: bool = True) -> None:
        """In the middle of a step the module's parameters are the full ones, and gradients are kept on the shards."""
        zero_grad(set_to_none)
        shards = {parameter for group in self._groups for parameter in group.parameters}
        for shard in shards:
            if shard.grad is not None and set_to_none:
                shard.grad = None
            elif shard.grad is not None:
                shard.grad.zero_()
        if not self._keeps_unreduced:
            self._reduction.discard({id(shard) for shard in shards})

    def _toggle(self, toggle: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Lightning sets ``requires_grad`` on the optimizers' parameters, which are the shards; in the middle of a step
        the module computes with the full ones.
        """
        toggle(*args, **kwargs)
        for group in self._groups:
            group.sync_requires_grad()

    def _trace_call(self, name: str, _module: nn.Module, _args: Any) -> None:
        """In stage 3 the blocks that ran decide the messages; remember them to compare over the ranks."""
        self._trace.append(name)

    def _gather_outside_step(self, _module: nn.Module, _args: Any) -> None:
        """A callback or an epoch hook calls the module between steps (to draw samples, say)."""
        if not self._in_step:
            self._gather()

    # -- a step ------------------------------------------------------------------------------------------------------

    def run_step(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        manual = not getattr(self.module, "automatic_optimization", True)
        if torch.is_grad_enabled() and self.module.training:
            self._send_changed_buffers()
        # Stages 1 and 2 keep full parameters through a window, all stages keep those of the root through a step hook
        # that runs backward itself.
        last = not self._window_open and not manual
        for group in self._groups:
            keep = self._driven or (not last and (self._gather_all or group is self._root_group))
            group.configure(reduce=self._reduces_now, reshard=not keep)
            group.is_in_step = not manual and not self._driven
        self._gather()
        self._in_step, self._awaits_reduction = True, False
        try:
            with in_step(), nullcontext() if self._whole is None else self._whole:
                return self.root(step, *args, **kwargs)
        finally:
            self._in_step = False
            for group in self._groups:
                group.is_in_step = False
            if self._whole is not None and not self._whole.was_needed:
                self._whole = None  # it costs a little in every torch function, and the first step had no use for it
            self._reduction.has_direct_gradients = self._whole is not None

    def _gather(self) -> None:
        """Put full parameters into the module; two messages are under way at any time."""
        wanted = [
            group for group in self._groups if group.is_sharded and (self._gather_all or group is self._root_group)
        ]
        with torch.no_grad(), torch.inference_mode(False):
            for index, group in enumerate(wanted):
                if index == 0:
                    group.gather()
                if index + 1 < len(wanted):
                    wanted[index + 1].gather()
                group.wait()

    def rest(self) -> None:
        for group in self._groups:
            group.settle()
            group.shard()
            group.follow_names()

    # -- gradients ---------------------------------------------------------------------------------------------------

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        was_open, self._window_open = self._window_open, True
        try:
            yield
        finally:
            self._window_open = was_open

    @contextmanager
    def whole_window(self) -> Iterator[None]:
        was_open, self._window_open = self._window_open, False
        try:
            yield
        finally:
            self._window_open = was_open

    def before_backward(self, loss: Tensor) -> None:
        """Gradients are reduced by hooks of autograd, which need no word before."""

    def after_microbatch(self) -> None:
        for group in self._groups:
            group.set_aside()

    @contextmanager
    def alone(self) -> Iterator[None]:
        every, self._sync_every_backward = self._sync_every_backward, False
        try:
            with self.accumulate():
                yield
        finally:
            self._sync_every_backward = every

    @property
    def _reduces_now(self) -> bool:
        return self._sync_every_backward or not self._window_open

    def after_backward(self) -> None:
        self._awaits_reduction = not self._reduces_now
        if self._reduces_now:
            self._reduction.finish()

    def keep_unreduced(self, keep: bool) -> None:
        self._keeps_unreduced = keep

    def before_optimizer_step(self) -> None:
        for group in self._groups:
            group.configure(reduce=True, reshard=True)
        fingerprint = zlib.crc32("\n".join(self._trace).encode())
        if not self._reduction.close_window(fingerprint):
            self._raise_different_traces()
        self._trace.clear()
        self.rest()

    def after_optimizer_step(self) -> None:
        if self._in_step:  # manual optimization: the module goes on with the updated parameters
            self._gather()

    def shard_of(self, parameter: Tensor) -> Tensor | None:
        if self._awaits_reduction:  # like DistributedDataParallel's: the full parameter has this rank's own gradient
            return None
        if len(self._shards) < sum(len(group.parameters) for group in self._groups):  # made by the first gathering
            self._shards = {id(full): shard for group in self._groups for full, shard in group.full_parameters()}
        return self._shards.get(id(parameter))

    def watch(self, optimizer: Optimizer) -> None:
        """Let ``zero_grad`` also forget gradients that were not reduced yet."""
        original = optimizer.zero_grad
        if optimizer in self._watched:
            return

        def zero_grad(set_to_none: bool = True) -> None:
            original(set_to_none)
            if not self._keeps_unreduced:
                self._reduction.discard({id(p) for group in optimizer.param_groups for p in group["params"]})

        self._watched.append(optimizer)
        self._undo.push(partial(_put_back, optimizer, "zero_grad", vars(optimizer).get("zero_grad")))
        optimizer.zero_grad = zero_grad  # type: ignore[method-assign]

    def scale_gradients(self, factor: float) -> None:
        self.rest()
        super().scale_gradients(factor)
        for group in self._groups:
            group.scale_unreduced(factor)

    def discard(self) -> None:
        self.rest()
        super().discard()
        self._reduction.discard({id(parameter) for parameter in self.module.parameters()})
        self._trace.clear()

    # -- buffers -----------------------------------------------------------------------------------------------------

    def sync_buffers(self) -> None:
        self._buffers.send()

    def _send_changed_buffers(self) -> None:
        if self._reduction.changed_buffers:
            self._buffers.send(self._reduction.changed_buffers)
            self._reduction.changed_buffers = frozenset()

    # -- the end -----------------------------------------------------------------------------------------------------

    def release(self, optimizers: Sequence[Optimizer]) -> bool:
        self.rest()
        needed = sum(p.numel() * p.element_size() for p in self.module.parameters())
        if self._agreement.any([needed * self._processes_per_node > 0.5 * available_memory()])[0]:
            return False
        self.undo(optimizers)
        return True

    def leave(self) -> None:
        self._undo.run()

    def undo(self, optimizers: Sequence[Optimizer]) -> None:
        """Make the module an ordinary one on the CPU; all ranks must call this."""
        self.rest()
        self.leave()
        detached = DetachedOptimizers(optimizers, self.module)
        full = {id(p): _full(p) for group in self._groups for p in group.parameters}
        noted = {name: attributes(parameter) for name, parameter in self.module.named_parameters()}
        fsdp_compat.undo(self.root, full)
        for name, parameter in self.module.named_parameters():
            parameter.__dict__.update(noted[name])
        detached.attach(self.module)
        self.module.cpu()

    # -- errors ------------------------------------------------------------------------------------------------------

    def _raise_different_traces(self) -> None:
        traces = self._agreement.gather(self._trace)
        for rank, trace in enumerate(traces):
            if trace != traces[0]:
                place = next(
                    (i for i, pair in enumerate(zip(traces[0], trace, strict=False)) if pair[0] != pair[1]),
                    min(len(trace), len(traces[0])),
                )
                raise RuntimeError(
                    "Data-parallel ranks ran different parts of the module in one step, which zero_stage=3 cannot"
                    f" serve: as call number {place + 1}, rank 0 ran {_entry(traces[0], place)} and rank {rank} ran"
                    f" {_entry(trace, place)}. The gradients of this step are not used. Run the same blocks on all"
                    " ranks, or use zero_stage=2, where parameters are gathered in one order on all ranks"
                )

    def explain(self, exception: BaseException) -> None:
        if "mixed torch.Tensor and DTensor" in str(exception):
            exception.add_note(
                "lightning_effi: a sharded tensor met a plain one. `tensor.full_tensor()`, called on all ranks, is its"
                " whole as a plain tensor"
                if self._gather_all
                else "lightning_effi: with zero_stage=3, a parameter of a block was used outside the block's forward,"
                " which no step before this one did. Use zero_stage=2, where all parameters are whole throughout a step"
            )
        if self._trace:
            exception.add_note(
                f"lightning_effi: with zero_stage=3, the last block that this rank ran was '{self._trace[-1]}'. If a"
                " collective timed out, compare this line over the ranks: all must run the same blocks"
            )


def _put_back(owner: Any, name: str, value: Any) -> None:
    """Give an object the attribute of its own that it had, or none."""
    if value is None:
        vars(owner).pop(name, None)
    else:
        vars(owner)[name] = value


def available_memory() -> float:
    """Bytes of this machine's memory that are free; infinity where the system does not tell."""
    try:
        return float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (ValueError, OSError, AttributeError):  # not known on this system
        return float("inf")


def _entry(trace: list[str], place: int) -> str:
    return f"'{trace[place]}'" if place < len(trace) else "nothing more"


def _full(parameter: Any) -> Tensor:
    return parameter.detach().full_tensor().cpu()


def _refuse_hooks(module: nn.Module, plan: ShardingPlan) -> None:
    """Before anything is changed: what a hook would be given that shards cannot give it.

    Raises:
        ValueError: with the parameter's name.
    """
    for name in (info.name for group in plan.groups for info in group.parameters):
        if module.get_parameter(name)._post_accumulate_grad_hooks:
            raise ValueError(
                f"'{name}' has a hook of register_post_accumulate_grad_hook, which would see this rank's gradient"
                f" before it is averaged, and zero_stage={plan.zero_stage} keeps none of it. Use on_after_backward, or"
                " register_hook"
            )


def _is_dtensor(tensor: Tensor) -> bool:
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)
