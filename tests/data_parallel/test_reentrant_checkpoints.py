"""``checkpoint(..., use_reentrant=True)`` at stage 0, where DDP's search for unused parameters does not see into it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from tests.harness.fitting import Fit
from tests.harness.several_fits import assert_outcomes_equal, fit_several, single_processes
from tests.models import hugging_face
from tests.models.gpt import GPT, batches

BATCHES = 4


class Checkpointed(GPT):
    """Its second block goes through reentrant checkpoints, the first as well if not told otherwise."""

    def __init__(self, first: str = "reentrant", calls: int = 1, since: int = 0, frozen: bool = False) -> None:
        super().__init__(blocks=2)
        self.first, self.calls, self.since, self.batch = first, calls, since, 0
        self.blocks[0].requires_grad_(not frozen)

    @override
    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.positions[: tokens.shape[1]]
        kinds = [self.first, "reentrant"] if self.batch >= self.since else ["plain", "plain"]
        for block, kind in zip(self.blocks, kinds, strict=True):
            for _ in range(self.calls):
                x = block(x) if kind == "plain" else checkpoint(block, x, use_reentrant=kind == "reentrant")
        return self.head(self.norm(x))

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.batch = batch_idx
        return super().training_step(batch, batch_idx)


class PartlyUsed(Checkpointed):
    """One parameter is used for some rows alone, which are on one rank; another one never."""

    def __init__(self) -> None:
        super().__init__()
        self.for_some, self.never = nn.Parameter(torch.zeros(16)), nn.Parameter(torch.ones(3))

    @override
    def loss(self, batch: Tensor) -> Tensor:
        losses = [super(PartlyUsed, self).loss(row[None]) for row in batch]
        chosen = [(self.for_some - 1).square().sum() for row in batch if row[0] % 2]
        return (sum(losses) + sum(chosen)) / len(batch)


class ByHand(Checkpointed):
    """Two backwards before each step, the second without checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        self.manual_backward(0.1 * self.head.weight.square().sum())
        optimizer.step()


def transformers_gpt2() -> Any:
    module = hugging_face.gpt2()
    module.model.gradient_checkpointing_enable({"use_reentrant": True})
    return module


def sequences() -> list[dict[str, Tensor]]:
    """Batches without padding, whose ranks have equally many labels."""
    generator = torch.Generator().manual_seed(3)
    tokens = [torch.randint(1, hugging_face.VOCABULARY, (2, 6), generator=generator) for _ in range(BATCHES)]
    return [{"input_ids": each, "labels": each} for each in tokens]


def runs(names: tuple[str, ...]) -> dict[str, Fit]:
    def fit(module: Any, **trainer: Any) -> Fit:
        return Fit(module, partial(batches, BATCHES), {"zero_stage": 0}, trainer=trainer)

    cases = {
        "every block": fit(Checkpointed),
        "both kinds": fit(partial(Checkpointed, "other")),
        "called twice": fit(partial(Checkpointed, "plain", calls=2)),
        "from the third batch on": fit(partial(Checkpointed, since=2)),
        "accumulated": fit(partial(Checkpointed, since=1), accumulate_grad_batches=2),
        "one block frozen": fit(partial(Checkpointed, frozen=True)),
        "partly used": fit(PartlyUsed),
        "manual": fit(ByHand),
        "transformers": replace(fit(transformers_gpt2), batches=sequences),
    }
    return {name: cases[name] for name in names}


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(("called twice", "accumulated", "partly used", "manual"), id="some"),
        pytest.param(
            ("every block", "both kinds", "from the third batch on", "one block frozen", "transformers"),
            id="others",
            marks=pytest.mark.full,
        ),
    ],
)
def test_updates_equal_single_process(names: tuple[str, ...]) -> None:
    fits = runs(names)
    expected = single_processes(fits)
    for name, outcomes in fit_several(fits).items():
        per_step = 2 if name == "accumulated" else 1
        assert_outcomes_equal(outcomes, expected[name], batches_per_step=per_step)
        assert all("never" not in gradients for outcome in outcomes for gradients in outcome.gradients)
