"""What a run asks of data parallelism, for the one stage that this rank holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_effi.comm.agreement import Agreement
from lightning_effi.comm.broadcast import broadcast_states
from lightning_effi.compat import lightning as lightning_compat
from lightning_effi.context import RunContext
from lightning_effi.data_parallel.casting import computed_in
from lightning_effi.data_parallel.engine import Engine, WholeEngine
from lightning_effi.data_parallel.sharded import ShardedEngine, available_memory
from lightning_effi.modules.deferred import DeferredValues
from lightning_effi.pipeline_parallel.stage_parameters import StageParameters, sum_gradients


class UnsplitEngine(WholeEngine):
    """The whole module on each rank of a pipeline, from set-up until the first training step splits it.

    Evaluation, as before training, runs on it as it is. All ranks have the values of the first one.

    Args:
        module: the LightningModule; moved to the device in place.
        context: of the run.
    """

    def __init__(self, module: nn.Module, context: RunContext) -> None:
        super().__init__(module)
        self._compute = context.precision.compute
        DeferredValues(module).fill_through(module)
        module.to(context.device)
        for group in (context.groups.pipeline, context.groups.data):
            broadcast_states([*module.parameters(), *module.buffers()], group.device)
        _share_randomness(context.groups.pipeline.control)

    def run_step(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with computed_in(self._compute, self.module):
            return step(*args, **kwargs)


class PipelineEngine(Engine):
    """This rank's stage of a module, held in shards, or copied on all its data-parallel ranks.

    Args:
        module: the LightningModule, of which the other stages' parameters are gone.
        stages: the parameters of this rank's stage.
        sharded: the engine of the stage where its parameters are shards.
        context: of the run.
        make_whole: at the end of a run, given the optimizers: layers that tensor parallelism has split are whole again,
            and every rank holds all stages.
    """

    def __init__(
        self,
        module: nn.Module,
        stages: StageParameters,
        sharded: ShardedEngine | None,
        context: RunContext,
        make_whole: Callable[[Sequence[Optimizer]], None],
    ) -> None:
        super().__init__(module)
        self._stages = stages
        self._sharded = sharded
        self._stage: Engine = WholeEngine(module) if sharded is None else sharded
        self._replicas = context.groups.data  # ranks of other pipelines that hold the same stage
        self._agreement = Agreement(context.groups.run.control)
        self._processes_per_node = context.processes_per_node
        self._sync_every_microbatch = context.config.gradient_sync == "every"
        self._make_whole = make_whole

    @property
    def is_sharded(self) -> bool:
        return self._stage.is_sharded

    # -- a step ------------------------------------------------------------------------------------------------------

    def run_step(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """``step(*args, **kwargs)`` while this rank holds the whole parameters of its stage."""
        return self._stage.run_step(step, *args, **kwargs)

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        with self._stage.accumulate():
            yield

    @contextmanager
    def whole_window(self) -> Iterator[None]:
        with self._stage.whole_window():
            yield

    @contextmanager
    def alone(self) -> Iterator[None]:
        raise RuntimeError("stages of a pipeline wait for each other within a step, and none runs it alone")
        yield

    def before_backward(self, loss: Tensor) -> None:
        self._stage.before_backward(loss)

    def after_microbatch(self) -> None:
        if self._sync_every_microbatch:
            self._stage.after_backward()
        else:
            self._stage.after_microbatch()

    def after_backward(self) -> None:
        if not self._sync_every_microbatch:
            self._stage.after_backward()

    def before_optimizer_step(self) -> None:
        self._stage.before_optimizer_step()
        self._stages.add_up_shared()
        if not self.is_sharded:
            mine = [parameter for parameter in self._stages.local.values() if parameter.requires_grad]
            replicas = self._replicas.device
            sum_gradients(mine, replicas, divisor=dist.get_world_size(replicas))

    def after_optimizer_step(self) -> None:
        self._stage.after_optimizer_step()

    def rest(self) -> None:
        self._stage.rest()

    def sync_buffers(self) -> None:
        self._stage.sync_buffers()

    # -- gradients ---------------------------------------------------------------------------------------------------

    def keep_unreduced(self, keep: bool) -> None:
        self._stage.keep_unreduced(keep)

    def discard(self) -> None:
        self._stage.discard()

    def scale_gradients(self, factor: float) -> None:
        self._stage.scale_gradients(factor)

    def shard_of(self, parameter: Tensor) -> Tensor | None:
        return self._stage.shard_of(parameter)

    def watch(self, optimizer: Optimizer) -> None:
        self._stage.watch(optimizer)

    # -- the end -----------------------------------------------------------------------------------------------------

    def release(self, optimizers: Sequence[Optimizer]) -> bool:
        needed = self._stages.bytes * self._processes_per_node
        if self._agreement.any([needed > 0.5 * available_memory()])[0]:
            return False
        if self._sharded is not None:
            self._sharded.undo(optimizers)
        self._make_whole(optimizers)
        self.module.cpu()
        lightning_compat.optimizers_to_device(optimizers, torch.device("cpu"))
        return True

    def leave(self) -> None:
        self._stage.leave()

    def explain(self, exception: BaseException) -> None:
        exception.add_note(f"lightning_effi: raised on pipeline stage {self._stages.stage}")


def _share_randomness(group: dist.ProcessGroup) -> None:
    """A loader that shuffles must draw one order for all stages, also where the user set no seed."""
    state = torch.get_rng_state()
    dist.broadcast(state, dist.get_process_group_ranks(group)[0], group=group)
    torch.set_rng_state(state)
