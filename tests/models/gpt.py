"""A small GPT written by hand: fused qkv, learned positions, a causal-mask buffer, an optionally tied head."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models.base import ExampleModule, OptimizerName

VOCABULARY = 17
CONTEXT = 12


class CausalSelfAttention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.register_buffer("mask", torch.ones(CONTEXT, CONTEXT).tril().bool(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        q, k, v = (part.view(rows, length, self.heads, -1).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        weights = scores.masked_fill(~self.mask[:length, :length], float("-inf")).softmax(dim=-1)
        return self.proj((weights @ v).transpose(1, 2).reshape(rows, length, width))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = CausalSelfAttention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(ExampleModule):
    """Next-token prediction; a batch is ``tokens [rows, CONTEXT + 1]``."""

    def __init__(
        self,
        tied: bool = True,
        width: int = 16,
        heads: int = 4,
        blocks: int = 4,
        optimizer: OptimizerName = "sgd",
        learning_rate: float | None = None,
    ) -> None:
        super().__init__(optimizer, learning_rate)
        self.embedding = nn.Embedding(VOCABULARY, width)
        nn.init.normal_(self.embedding.weight, std=0.3)
        self.positions = nn.Parameter(0.1 * torch.randn(CONTEXT, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.positions[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def loss(self, batch: Tensor) -> Tensor:
        return F.cross_entropy(self(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def batches(count: int, rows: int = 2, seed: int = 1) -> list[Tensor]:
    """``count`` different batches of shape ``[rows, CONTEXT + 1]``."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(VOCABULARY, (rows, CONTEXT + 1), generator=generator) for _ in range(count)]
