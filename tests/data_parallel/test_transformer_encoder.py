"""``nn.TransformerEncoder`` has a fast path for evaluation that calls none of its sub-modules."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.harness.fitting import ALL_STAGES, Fit, assert_equals_single_process, single_process
from tests.models.encoder import IGNORED, TokenClassifier
from tests.models.encoder import batches as padded_batches


class RowMeanClassifier(TokenClassifier):
    """Mean over rows of each row's mean, so that any cut of the batch into rows has the same mean."""

    def __init__(self) -> None:
        super().__init__(width=8, heads=2, blocks=2)

    def loss(self, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        tokens, padding, labels = batch
        logits = self(tokens, padding).transpose(1, 2)
        per_token = F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="none")
        return (per_token.sum(dim=1) / (labels != IGNORED).sum(dim=1)).mean()


class ValidationLosses(pl.Callback):
    def __init__(self) -> None:
        self.observation: list[float] = []

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not trainer.sanity_checking:
            self.observation.append(float(trainer.callback_metrics["val_loss"]))


def batches() -> list[Any]:
    return padded_batches(3, rows=4)


@ALL_STAGES
def test_training_and_validation_in_turn_equal_single_process(zero_stage: int) -> None:
    run = Fit(
        RowMeanClassifier,
        batches,
        {"zero_stage": zero_stage},
        validation=batches,
        callbacks=(ValidationLosses,),
        trainer={"val_check_interval": 1, "num_sanity_val_steps": 1},
    )
    outcomes = assert_equals_single_process(run)
    expected = torch.tensor(single_process(run).observations[0])
    assert len(expected) == 3
    assert expected.unique().numel() == 3, "training changed nothing between the validations"
    for outcome in outcomes:
        torch.testing.assert_close(torch.tensor(outcome.observations[0]), expected, rtol=1e-6, atol=0)
