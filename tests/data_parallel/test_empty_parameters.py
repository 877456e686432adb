"""A table without rows (categories that a dataset does not have) is trained beside, as in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.harness import Training, train_and_assert_parity
from tests.models import gpt


class WithoutCategories(gpt.GPT):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.categories = nn.Embedding(0, 16)

    def loss(self, batch: Tensor) -> Tensor:
        nothing = self.categories(torch.empty(len(batch), 0, dtype=torch.long)).sum()
        return super().loss(batch) + nothing


@pytest.mark.parametrize("zero_stage", [2, 3])
def test_parameters_without_elements_are_trained_beside(zero_stage: int) -> None:
    train_and_assert_parity(
        Training(WithoutCategories, gpt.batches, strategy={"zero_stage": zero_stage}, world_size=2, clip=0.1)
    )
