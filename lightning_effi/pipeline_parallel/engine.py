"""What the strategy asks of data parallelism, for the one stage that this rank holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from lightning_effi.comm.agreement import Agreement
from lightning_effi.comm.broadcast import broadcast_states
from lightning_effi.data_parallel.engine import Engine
from lightning_effi.data_parallel.sharded import ShardedEngine, available_memory
from lightning_effi.modules.deferred import DeferredValues
from lightning_effi.pipeline_parallel.stage_parameters import sum_gradients

if TYPE_CHECKING:
    from lightning_effi.pipeline_parallel.running.runner import PipelineRunner
    from lightning_effi.pipeline_parallel.stage_parameters import StageParameters


class PipelineEngine(Engine):
    """A module that is whole until its first training step, and this rank's stage of it from then on.

    The stage is sharded by an engine of its own (:meth:`shard`), or copied on all its data-parallel ranks.

    Args:
        module: the LightningModule; moved to ``device`` in place, with the first stage's values.
        group: the ranks of the pipeline.
        replicas: the ranks of other pipelines that hold the same stage, over which gradients are averaged.
        pipeline_control_group: as ``group``, with a backend for CPU tensors.
        control_group: all ranks of the run, with a backend for CPU tensors.
        device: where the module lives.
        processes_per_node: how many processes share this machine's memory.
        sync_every_microbatch: reduce sharded gradients after each micro-batch, or only after a step's last one.
        computing: inside this context, a whole module's parameters have the dtypes that they are computed with.
        undo_tensor: makes layers whole that tensor parallelism has split.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        group: dist.ProcessGroup,
        replicas: dist.ProcessGroup,
        pipeline_control_group: dist.ProcessGroup,
        control_group: dist.ProcessGroup,
        device: torch.device,
        processes_per_node: int,
        sync_every_microbatch: bool,
        computing: Callable[[nn.Module], AbstractContextManager[None]],
        undo_tensor: Callable[[], None],
    ) -> None:
        super().__init__(module)
        DeferredValues(module).fill_through(module)
        module.to(device)
        for ranks in (group, replicas):
            broadcast_states([*module.parameters(), *module.buffers()], ranks)
        _share_randomness(pipeline_control_group)
        self._replicas = replicas
        self._agreement = Agreement(control_group)
        self._processes_per_node = processes_per_node
        self._sync_every_microbatch = sync_every_microbatch
        self._computing = computing
        self._undo_tensor = undo_tensor
        self._sharded: ShardedEngine | None = None
        self.runner: PipelineRunner | None = None

    @property
    def stages(self) -> StageParameters | None:
        """The parameters of this rank's stage, once the module has been split."""
        return None if self.runner is None else self.runner.stages

    @property
    def is_sharded(self) -> bool:
        return self._sharded is not None

    def shard(self, engine: ShardedEngine) -> None:
        """From here on, ``engine`` holds the parameters of the stage in shards."""
        assert self.stages is not None
        self._sharded = engine
        self.stages.follow(self.module)

    # -- a step ------------------------------------------------------------------------------------------------------

    def run_step(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Evaluation: before the first training step by the whole module, then through the stages."""
        if self.runner is None or self.stages is None:
            with self._computing(self.module):
                return step(*args, **kwargs)
        return self.with_parameters(self.runner.evaluate, step, *args, **kwargs)

    def with_parameters(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """``call(*args, **kwargs)`` while this rank holds the whole parameters of its stage."""
        return call(*args, **kwargs) if self._sharded is None else self._sharded.run_step(call, *args, **kwargs)

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        if self._sharded is None:
            yield
        else:
            with self._sharded.accumulate():
                yield

    @contextmanager
    def whole_window(self) -> Iterator[None]:
        if self._sharded is None:
            yield
        else:
            with self._sharded.whole_window():
                yield

    def after_microbatch(self) -> None:
        if self._sharded is not None:
            if self._sync_every_microbatch:
                self._sharded.after_backward()
            else:
                self._sharded.after_microbatch()

    def after_backward(self) -> None:
        if self._sharded is not None and not self._sync_every_microbatch:
            self._sharded.after_backward()

    def before_optimizer_step(self) -> None:
        if self.stages is None:
            return
        if self._sharded is not None:
            self._sharded.before_optimizer_step()
        self.stages.add_up_shared()
        if self._sharded is None:
            mine = [parameter for parameter in self.stages.local.values() if parameter.requires_grad]
            sum_gradients(mine, self._replicas, divisor=dist.get_world_size(self._replicas))

    def after_optimizer_step(self) -> None:
        if self._sharded is not None:
            self._sharded.after_optimizer_step()

    def rest(self) -> None:
        if self._sharded is not None:
            self._sharded.rest()

    def sync_buffers(self) -> None:
        if self._sharded is not None:
            self._sharded.sync_buffers()

    # -- gradients ---------------------------------------------------------------------------------------------------

    def keep_unreduced(self, keep: bool) -> None:
        if self._sharded is not None:
            self._sharded.keep_unreduced(keep)

    def discard(self) -> None:
        if self._sharded is not None:
            self._sharded.discard()
        super().discard()

    def watch(self, optimizer: Optimizer) -> None:
        if self._sharded is not None:
            self._sharded.watch(optimizer)

    # -- the end -----------------------------------------------------------------------------------------------------

    def release(self, optimizers: Sequence[Optimizer]) -> bool:
        if self.runner is not None and self.stages is not None:
            needed = self.stages.bytes * self._processes_per_node
            if self._agreement.any([needed > 0.5 * available_memory()])[0]:
                return False
            if self._sharded is not None:
                self._sharded.undo(optimizers)
                self._sharded = None
            self._undo_tensor()
            self.stages.follow(self.module)
        if self.runner is not None:
            self.runner.make_whole(optimizers)
        return super().release(optimizers)

    def explain(self, exception: BaseException) -> None:
        if self.runner is not None and self.stages is not None:
            exception.add_note(f"lightning_effi: raised on pipeline stage {self.runner.stage}")


def _share_randomness(group: dist.ProcessGroup) -> None:
    """A loader that shuffles must draw one order for all stages, also where the user set no seed."""
    state = torch.get_rng_state()
    dist.broadcast(state, dist.get_process_group_ranks(group)[0], group=group)
    torch.set_rng_state(state)
