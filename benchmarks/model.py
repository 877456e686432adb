"""The module that every variant trains: a small causal transformer on random tokens."""

from __future__ import annotations

from dataclasses import dataclass

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

VOCABULARY = 256
HEAD_WIDTH = 64


@dataclass(frozen=True)
class Size:
    """Sizes of the model and of one process's batch.

    Attributes:
        width: residual stream, a multiple of 64 or less than 64.
        layers: transformer blocks.
        batch: sequences per process and step.
        sequence: tokens per sequence.
    """

    width: int
    layers: int
    batch: int
    sequence: int

    def __post_init__(self) -> None:
        for name in ("width", "layers", "batch", "sequence"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.width > HEAD_WIDTH and self.width % HEAD_WIDTH:
            raise ValueError(f"width={self.width} must be a multiple of {HEAD_WIDTH}")


class Block(nn.Module):
    """Pre-norm attention and MLP: [batch, sequence, width] → same."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = max(1, width // HEAD_WIDTH)
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, sequence, width = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, sequence, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(attended.transpose(1, 2).reshape(batch, sequence, width))
        return x + self.mlp(self.mlp_norm(x))


class Transformer(nn.Module):
    """Tokens [batch, sequence] → logits [batch, sequence, vocabulary]."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, size.width)
        self.position = nn.Parameter(torch.zeros(size.sequence, size.width))
        self.blocks = nn.ModuleList(Block(size.width) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class BenchmarkModule(pl.LightningModule):
    """An ordinary LightningModule; the hand-written loops use its parts."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        torch.manual_seed(0)  # the same weights in every block and on every rank
        self.size = size
        self.model = Transformer(size)

    @staticmethod
    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        inputs, targets = batch
        return self.loss(self.model(inputs), targets)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


def random_tokens(size: Size, steps: int, world_size: int) -> TensorDataset:
    """Enough sequences for ``steps`` steps on every rank."""
    generator = torch.Generator().manual_seed(1)
    shape = (steps * size.batch * world_size, size.sequence + 1)
    tokens = torch.randint(VOCABULARY, shape, generator=generator)
    return TensorDataset(tokens[:, :-1], tokens[:, 1:])


def plain_loader(size: Size, steps: int, world_size: int) -> DataLoader:
    """The loader handed to a Trainer, which adds the distributed sampler itself."""
    return DataLoader(random_tokens(size, steps, world_size), batch_size=size.batch)
