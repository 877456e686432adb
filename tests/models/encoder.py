"""``nn.TransformerEncoder`` with a padding mask and a token loss that ignores unlabelled positions."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models.base import ExampleModule, OptimizerName

VOCABULARY = 19
LENGTH = 10
CLASSES = 5
IGNORED = -100


class TokenClassifier(ExampleModule):
    """A batch is ``(tokens [rows, LENGTH], padding [rows, LENGTH] bool, labels [rows, LENGTH])``."""

    def __init__(
        self,
        width: int = 16,
        heads: int = 4,
        blocks: int = 4,
        optimizer: OptimizerName = "sgd",
        learning_rate: float | None = None,
    ) -> None:
        super().__init__(optimizer, learning_rate)
        self.embedding = nn.Embedding(VOCABULARY, width, padding_idx=0)
        self.positions = nn.Embedding(LENGTH, width)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, blocks)
        self.classifier = nn.Linear(width, CLASSES)

    def forward(self, tokens: Tensor, padding: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        return self.classifier(self.encoder(x, src_key_padding_mask=padding))

    def loss(self, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        tokens, padding, labels = batch
        return F.cross_entropy(self(tokens, padding).flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


def batches(count: int, rows: int = 3, seed: int = 2) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Rows of different lengths, padded; a third of the real tokens carry a label, the first one always."""
    generator = torch.Generator().manual_seed(seed)
    result = []
    for _ in range(count):
        lengths = torch.randint(2, LENGTH + 1, (rows, 1), generator=generator)
        padding = torch.arange(LENGTH) >= lengths
        tokens = torch.randint(1, VOCABULARY, (rows, LENGTH), generator=generator).masked_fill(padding, 0)
        labelled = torch.rand(rows, LENGTH, generator=generator) < 1 / 3
        labelled[:, 0] = True
        labels = torch.randint(CLASSES, (rows, LENGTH), generator=generator)
        result.append((tokens, padding, labels.masked_fill(padding | ~labelled, IGNORED)))
    return result
