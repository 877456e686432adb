"""What a module's own code reads from gradients of split layers is that of the whole, or an error, never one rank's."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from typing_extensions import override

from tests.gradients.test_gradients_seen_by_hooks import READERS, Read
from tests.harness import make_trainer, run_distributed, run_isolated
from tests.models.gpt import GPT, batches


class Manual(GPT):
    """Reads its gradients in ``training_step``."""

    def __init__(self) -> None:
        super().__init__(blocks=2)
        self.automatic_optimization = False
        self.observation: list[dict[str, Any]] = []

    @override
    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()  # type: ignore[union-attr]
        self.manual_backward(super().training_step(batch, batch_idx))
        self.observation.append({name: read(self) for name, read in READERS.items()})
        self.clip_gradients(optimizer, 0.1, "norm")  # type: ignore[arg-type]
        optimizer.step()  # type: ignore[union-attr]


def observe(manual: bool, strategy: Any, world_size: int) -> list[dict[str, Any]]:
    pl.seed_everything(7, verbose=False)
    module, read = Manual() if manual else GPT(blocks=2), Read()
    parts = max(1, world_size // 2)
    part = dist.get_rank() // 2 if world_size > 1 else 0
    data = [batch.chunk(parts)[part] for batch in batches(2)]
    callbacks = [] if manual else [read]
    trainer = make_trainer(strategy, world_size, callbacks=callbacks, max_steps=2, use_distributed_sampler=False)
    trainer.fit(module, DataLoader(data, batch_size=None))  # type: ignore[arg-type]
    return module.observation if isinstance(module, Manual) else read.observation


@pytest.mark.parametrize(
    ("zero_stage", "manual"), [(None, False), (None, True), (3, False), pytest.param(3, True, marks=pytest.mark.full)]
)
def test_the_value_read_is_that_of_the_whole_tensor(zero_stage: int | None, manual: bool) -> None:
    strategy, world_size = {"tensor_parallel_size": 2}, 2
    if zero_stage is not None:
        strategy, world_size = {**strategy, "zero_stage": zero_stage}, 4
    expected = run_isolated(observe, manual, None, 1)
    for observed in run_distributed(observe, world_size, manual, strategy, world_size):
        for ours, theirs in zip(observed, expected, strict=True):
            assert ours == {name: pytest.approx(value, rel=1e-5) for name, value in theirs.items()}
