"""Vision transformers: one written by hand with a BatchNorm stem, one from timm."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models.base import ExampleModule, OptimizerName

IMAGE = 8
CLASSES = 6


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        q, k, v = self.qkv(x).reshape(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(rows, length, width))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attn = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ViT(ExampleModule):
    """A batch is ``(images [rows, 3, IMAGE, IMAGE], classes [rows])``."""

    def __init__(
        self,
        width: int = 16,
        heads: int = 4,
        blocks: int = 4,
        optimizer: OptimizerName = "sgd",
        learning_rate: float | None = None,
    ) -> None:
        super().__init__(optimizer, learning_rate)
        self.stem = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, width, 2, stride=2)
        )
        self.cls_token = nn.Parameter(0.1 * torch.randn(1, 1, width))
        self.positions = nn.Parameter(0.1 * torch.randn(1, 1 + (IMAGE // 2) ** 2, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        patches = self.stem(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(len(patches), -1, -1), patches], dim=1) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        images, classes = batch
        return F.cross_entropy(self(images), classes)


class ImageClassifier(ExampleModule):
    """Any network from images to classes."""

    def __init__(
        self, network: nn.Module, optimizer: OptimizerName = "sgd", learning_rate: float | None = None
    ) -> None:
        super().__init__(optimizer, learning_rate)
        self.network = network

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        images, classes = batch
        return F.cross_entropy(self.network(images), classes)


def timm_vit(**settings: Any) -> ImageClassifier:
    from timm.models.vision_transformer import VisionTransformer

    network = VisionTransformer(
        img_size=IMAGE, patch_size=2, num_classes=CLASSES, embed_dim=16, depth=4, num_heads=4, mlp_ratio=2
    )
    return ImageClassifier(network, **settings)


def batches(count: int, rows: int = 3, seed: int = 5) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(rows, 3, IMAGE, IMAGE, generator=generator),
            torch.randint(CLASSES, (rows,), generator=generator),
        )
        for _ in range(count)
    ]
