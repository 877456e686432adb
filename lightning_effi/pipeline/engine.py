"""What the strategy asks of data parallelism, for the one stage that this rank holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_effi.sharding.deferred import DeferredValues
from lightning_effi.sharding.engine import Engine
from lightning_effi.sharding.initial import broadcast_states

if TYPE_CHECKING:
    from lightning_effi.pipeline.runner import PipelineRunner
    from lightning_effi.pipeline.stages import StageParameters


class PipelineEngine(Engine):
    """A module that is whole until its first training step, and this rank's stage of it from then on.

    Args:
        module: the LightningModule; moved to ``device`` in place, with the first stage's values.
        group: the ranks of the pipeline.
        replicas: the ranks of other pipelines that hold the same stage, over which gradients are averaged.
        device: where the module lives.
    """

    def __init__(
        self, module: nn.Module, *, group: dist.ProcessGroup, replicas: dist.ProcessGroup, device: torch.device
    ) -> None:
        super().__init__(module)
        DeferredValues(module).fill_through(module)
        module.to(device)
        for ranks in (group, replicas):
            broadcast_states([*module.parameters(), *module.buffers()], ranks)
        _share_randomness(group)
        self._replicas = replicas
        self.runner: PipelineRunner | None = None

    @property
    def stages(self) -> StageParameters | None:
        """The parameters of this rank's stage, once the module has been split."""
        return None if self.runner is None else self.runner.stages

    def run_step(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Evaluation: before the first training step by the whole module, then through the stages."""
        if self.runner is None or self.stages is None:
            return step(*args, **kwargs)
        return self.runner.evaluate(step, *args, **kwargs)

    def before_optimizer_step(self) -> None:
        if self.stages is not None:
            self.stages.add_up_shared()
            _average([p for p in self.stages.local.values() if p.requires_grad], self._replicas)

    def release(self, optimizers: Sequence[Optimizer]) -> bool:
        if self.runner is not None:
            self.runner.make_whole()
        return super().release(optimizers)

    def explain(self, exception: BaseException) -> None:
        if self.runner is not None and self.stages is not None:
            exception.add_note(f"lightning_effi: raised on pipeline stage {self.runner.stage}")


def _share_randomness(group: dist.ProcessGroup) -> None:
    """A loader that shuffles must draw one order for all stages, also where the user set no seed."""
    state = torch.get_rng_state()
    dist.broadcast(state, dist.get_process_group_ranks(group)[0], group=group)
    torch.set_rng_state(state)


@torch.no_grad()
def _average(parameters: Sequence[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Average gradients over the ranks of ``group``, in one message for each dtype; a missing one counts as zeros.

    A parameter that no rank used keeps no gradient, or weight decay would move it.
    """
    size = dist.get_world_size(group)
    if size == 1 or not parameters:
        return
    used = torch.tensor([parameter.grad is not None for parameter in parameters], dtype=torch.uint8)
    used = used.to(parameters[0].device)
    dist.all_reduce(used, dist.ReduceOp.MAX, group=group)
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for parameter, is_used in zip(parameters, used.tolist(), strict=True):
        if is_used:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            by_dtype.setdefault(parameter.dtype, []).append(parameter.grad)
    for gradients in by_dtype.values():
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        dist.all_reduce(flat, group=group)
        for gradient, part in zip(gradients, flat.div_(size).split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))
