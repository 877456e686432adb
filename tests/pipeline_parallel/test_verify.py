"""``verify=True``: loss and gradients of the first batch through the stages against the whole module's."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch.nn.functional as F
from torch import Tensor

from tests.harness import Training, WorkerError, run, train_and_assert_parity
from tests.models.gpt import GPT, batches

VERIFIED = {"pipeline_parallel_size": 2, "microbatches": {"count": 3, "weight": "samples"}, "verify": True}


class Dropping(GPT):
    """Dropout is off while steps are compared, and on again when training begins."""

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) + F.dropout(self.positions[: tokens.shape[1], :1], 0.5, self.training)


class ClampsGradients(GPT):
    """A hook on a gradient is called for each micro-batch, and clamping parts is not clamping their sum."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.norm.weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))


def verified(module: Any, **settings: Any) -> Training:
    strategy = {**VERIFIED, **settings.pop("strategy", {})}
    return Training(module, partial(batches, rows=6), strategy=strategy, world_size=2, **settings)


def test_verified_run_is_that_of_the_single_process() -> None:
    train_and_assert_parity(verified(GPT, clip=0.1))


def test_verified_on_shards_and_within_a_window() -> None:
    training = verified(GPT, strategy={"zero_stage": 2}, accumulate=2)
    train_and_assert_parity(Training(**{**training.__dict__, "world_size": 4}))


def test_dropout_does_not_disturb_it() -> None:
    assert len(run(verified(Dropping)).losses) == 3


def test_what_is_not_the_same_is_not_trained() -> None:
    with pytest.raises(
        WorkerError, match=r"verify: the parallel module does not compute.*'norm.weight' is off.*Nothing was trained"
    ):
        run(verified(ClampsGradients))
