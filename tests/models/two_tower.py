"""A contrastive model: one encoder called twice per step, and a scalar temperature."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models.base import ExampleModule, OptimizerName

VOCABULARY = 13
LENGTH = 6


class TwoTower(ExampleModule):
    """A batch is ``(queries [rows, LENGTH], documents [rows, LENGTH])``; row i of one belongs to row i of the other."""

    def __init__(
        self,
        width: int = 16,
        heads: int = 4,
        blocks: int = 2,
        optimizer: OptimizerName = "sgd",
        learning_rate: float | None = None,
    ) -> None:
        super().__init__(optimizer, learning_rate)
        self.embedding = nn.Embedding(VOCABULARY, width)
        layer = nn.TransformerEncoderLayer(width, heads, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, blocks, enable_nested_tensor=False)
        self.logit_scale = nn.Parameter(torch.tensor(math.log(5.0)))

    def encode(self, tokens: Tensor) -> Tensor:
        return F.normalize(self.encoder(self.embedding(tokens)).mean(dim=1), dim=-1)

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        queries, documents = batch
        logits = self.logit_scale.exp() * self.encode(queries) @ self.encode(documents).T
        targets = torch.arange(len(logits), device=logits.device)
        return (F.cross_entropy(logits, targets) + F.cross_entropy(logits.T, targets)) / 2


def batches(count: int, rows: int = 4, seed: int = 6) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)

    def draw() -> Tensor:
        return torch.randint(VOCABULARY, (rows, LENGTH), generator=generator)

    return [(draw(), draw()) for _ in range(count)]
