"""Regression on floating-point inputs and targets, whose dtypes a careless precision conversion would change."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models.base import ExampleModule, OptimizerName

FEATURES = 5
LENGTH = 8


class Regressor(ExampleModule):
    """A batch is ``{"series": [rows, LENGTH, FEATURES], "target": [rows]}``, all float32."""

    def __init__(
        self,
        width: int = 16,
        heads: int = 4,
        blocks: int = 4,
        optimizer: OptimizerName = "sgd",
        learning_rate: float | None = None,
    ) -> None:
        super().__init__(optimizer, learning_rate)
        self.embed = nn.Linear(FEATURES, width)
        layer = nn.TransformerEncoderLayer(width, heads, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, blocks, norm=nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, 1)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        prediction = self.head(self.encoder(self.embed(batch["series"])).mean(dim=1)).squeeze(-1)
        return F.mse_loss(prediction, batch["target"])


def batches(count: int, rows: int = 4, seed: int = 8) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    series = torch.randn(count, rows, LENGTH, FEATURES, generator=generator)
    return [{"series": batch, "target": 0.3 * batch.sum(dim=(1, 2)).sin() + 0.3} for batch in series]
