"""Tensor parallelism in a run: the module stays whole until the first batch shows how it is used."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_effi.comm.agreement import Agreement
from lightning_effi.comm.broadcast import broadcast_states
from lightning_effi.compat import lightning as lightning_compat
from lightning_effi.data_parallel.casting import computed_in
from lightning_effi.modules import find_all_blocks
from lightning_effi.modules.deferred import DeferredValues
from lightning_effi.modules.eager import run_eagerly
from lightning_effi.modules.restore import restored
from lightning_effi.modules.undo import Undo
from lightning_effi.tensor_parallel.collectives import TensorGroup
from lightning_effi.tensor_parallel.layers.apply import AppliedPlan
from lightning_effi.tensor_parallel.layers.outside import WeightsOutsideLayers
from lightning_effi.tensor_parallel.planning.capture import BlockInputs
from lightning_effi.tensor_parallel.planning.plan import TensorPlan
from lightning_effi.tensor_parallel.planning.planner import Planner
from lightning_effi.tensor_parallel.randomness import agree_on_randomness
from lightning_effi.tensor_parallel.split import gathered
from lightning_effi.tensor_parallel.uses import UsesOfLogits

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from lightning_effi.context import RunContext

_CHECKED_STEPS = 3


class TensorRun:
    """Plans and applies tensor parallelism; does nothing where ``tensor_parallel_size`` is 1.

    The blocks' real inputs are needed to plan, and Lightning has them in the first step, after every set-up hook of the
    module has run and a checkpoint has been restored.
    """

    def __init__(self, context: RunContext) -> None:
        self._context = context
        self._applied: AppliedPlan | None = None
        self._outside: WeightsOutsideLayers | None = None
        self._uses = UsesOfLogits()
        self._steps = 0
        self.is_pending = False

    @property
    def is_wanted(self) -> bool:
        return self._context.layout.tensor > 1

    @property
    def _mesh(self) -> DeviceMesh:
        assert self._context.mesh is not None
        return self._context.mesh["tp"]

    def prepare(self, module: nn.Module, undo: Undo) -> None:
        """Equal values and equal randomness on all ranks, and the whole module on its device until the first step."""
        context = self._context
        DeferredValues(module).fill_through(module)
        module.to(context.device)
        broadcast_states([*module.parameters(), *module.buffers()], dist.group.WORLD)
        agree_on_randomness(context.groups.tensor.control, context.data_parallel_rank)
        lightning_compat.metrics_in_group(module, context.groups.user.device)
        undo.push(partial(lightning_compat.metrics_everywhere, module), "dist_sync_fn of the module's metrics")
        # in evaluation torch's encoder layers would pass their whole weights to one fused kernel
        before = torch.backends.mha.get_fastpath_enabled()
        undo.push(partial(torch.backends.mha.set_fastpath_enabled, before), "torch.backends.mha.set_fastpath_enabled")
        torch.backends.mha.set_fastpath_enabled(False)
        run_eagerly(module, undo, "tensor parallelism")
        self.is_pending = True

    @contextmanager
    def watching(self, module: nn.Module) -> Iterator[BlockInputs]:
        """Inside, a run of ``module`` shows what its blocks are called with."""
        inputs = BlockInputs(module, find_all_blocks(module))
        with inputs.watched():
            yield inputs

    def plan(
        self, module: nn.Module, step: Callable[..., Any], args: Any, kwargs: Any, seen: BlockInputs | None = None
    ) -> TensorPlan:
        """Decide what is split, on the arguments of the first step.

        Args:
            module: whole.
            step: its first one.
            args: of the step.
            kwargs: likewise.
            seen: what a run of that step has shown; where there is none, one is made.
        """
        context = self._context
        asked = context.config.tensor
        user_plan = {} if asked is None or asked.plan == "auto" else asked.plan
        planner = Planner(
            self._mesh,
            context.groups.tensor.control,
            user_plan,
            sequence_parallel=asked is not None and asked.sequence_parallel,
            vocabulary=context.layout.pipeline == 1,
        )
        blocks = find_all_blocks(module)
        with restored(module), computed_in(context.precision.compute, module):
            if seen is None:
                seen = BlockInputs(module, blocks)
                seen.capture(step, args, kwargs)
            return planner.plan(module, blocks, seen.kinds)

    def apply(self, module: nn.Module, plan: TensorPlan) -> None:
        """Split the layers of ``module``; optimizers must have been detached from its parameters."""
        self._applied = AppliedPlan(
            module,
            plan.layers,
            self._mesh,
            plan.sequence,
            plan.handing_out,
            whole_outputs=self._context.layout.pipeline > 1,  # what crosses a boundary is whole
        )
        self._outside = WeightsOutsideLayers(self._applied.group)
        self._uses = UsesOfLogits(layer.name for layer in plan.layers if layer.style == "vocab")
        self.is_pending = False

    def over(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """``step`` as it runs on the split module: weights may be used anywhere, and what it returns is whole."""
        return step if self._applied is None else partial(self._run, step, self._applied.group)

    def _run(self, step: Callable[..., Any], group: TensorGroup, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            with WeightsOutsideLayers(group):
                return gathered(step(*args, **kwargs))
        with nullcontext() if self._outside is None else self._outside, self._uses:
            output = gathered(step(*args, **kwargs))
        self._uses.say()
        if self._outside is not None and not self._outside.was_needed:
            self._outside = None  # it costs a little in every torch function, and the first step had no use for it
        return output

    def explain(self, exception: BaseException) -> None:
        """Add a note to ``exception`` where tensor parallelism knows more about its cause."""
        if self._applied is not None and "mixed torch.Tensor and DTensor" in str(exception):
            exception.add_note(
                "lightning_effi: with tensor parallelism, a weight that is split was used outside its layer, which the"
                " first training step did not do. Use it there too (multiplied by zero, say), or keep it whole by"
                " TensorParallel(plan={'<name of the layer>': 'replicate'})"
            )

    def undo(self) -> None:
        """Make the module whole again; all ranks must call this."""
        if self._applied is not None:
            self._applied.undo()
            self._applied = None

    def forget(self) -> None:
        """The module is put back otherwise, and is whole."""
        self._applied = self._outside = None
        self.is_pending = self.is_wanted

    def begin_step(self, batch: Any) -> None:
        """A step is about to run; in the first ones, make sure that the ranks of a group were given the same batch.

        Raises:
            RuntimeError: on all ranks of the group.
        """
        if self._applied is not None:
            self._applied.begin_step()
        if not self.is_wanted or self._steps >= _CHECKED_STEPS:
            return
        self._steps += 1
        group = self._context.groups.tensor.control
        if not Agreement(group).any_and_same([], _fingerprint(batch))[1]:
            raise RuntimeError(
                f"The {self._context.layout.tensor} ranks of a tensor-parallel group work on parts of one model and"
                f" were given different batches in step {self._steps}. A loader that shares out data by rank has to"
                " use strategy.data_parallel_rank and strategy.data_parallel_size, and random transforms the same seed"
            )


def _fingerprint(batch: Any) -> int:
    value = 0
    for leaf in tree_leaves(batch):
        if isinstance(leaf, Tensor):
            leaf = leaf.detach().cpu().contiguous()
            value = zlib.crc32(
                leaf.view(torch.uint8).numpy().tobytes() if leaf.dim() else repr(leaf.item()).encode(), value
            )
        elif isinstance(leaf, (int, float, str, bool)):
            value = zlib.crc32(repr(leaf).encode(), value)
    return value
