"""Ranks that run out of data at different times stop together, at the shortest."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from tests.harness import run_distributed
from tests.harness.fitting import Fit, Outcome, make_fit, rows_of_rank, single_process, whole
from tests.harness.parity import assert_tensors_close
from tests.models.gpt import CONTEXT, GPT, VOCABULARY

LONG, SHORT = 5, 4


class SmallGPT(GPT):
    def __init__(self) -> None:
        super().__init__(width=8, heads=2, blocks=2)


class Stream(IterableDataset[Tensor]):
    """Batches without a length."""

    def __init__(self, items: list[Tensor]) -> None:
        self.items = items

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.items)


def batches(count: int = LONG) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(VOCABULARY, (4, CONTEXT + 1), generator=generator) for _ in range(count)]


def short_batches() -> list[Tensor]:
    return batches()[:SHORT]


def fit_with_more_data_on_rank_0(run: Fit, streams: bool) -> Outcome:
    trainer, module, _, _, watch = make_fit(run)
    mine: list[Any] = [rows_of_rank(batch, trainer.global_rank, run.world_size) for batch in batches()]
    if trainer.global_rank == 1:
        mine = mine[:SHORT]
    train, validation = (DataLoader(Stream(mine) if streams else mine, batch_size=None) for _ in range(2))
    trainer.fit(module, train, validation)
    return watch.outcome


@pytest.mark.parametrize("streams", [True, False], ids=["iterable", "sized"])
@pytest.mark.parametrize("zero_stage", [0, 3])
def test_ranks_with_unequal_numbers_of_batches_stop_at_the_shortest(zero_stage: int, streams: bool) -> None:
    run = Fit(
        SmallGPT,
        short_batches,
        {"zero_stage": zero_stage},
        validation=short_batches,
        trainer={"val_check_interval": 2, "max_epochs": 2},
    )
    expected = single_process(run)
    for outcome in whole(run_distributed(fit_with_more_data_on_rank_0, 2, run, streams)):
        assert outcome.global_step == expected.global_step == 2 * SHORT
        assert_tensors_close("final parameters", outcome.parameters[-1], expected.parameters[-1], 1e-9)
        assert outcome.logged["val_loss"] == pytest.approx(expected.logged["val_loss"], rel=1e-7)
