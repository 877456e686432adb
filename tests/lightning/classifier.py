"""The LightningModule and data of these tests, as a stranger would write them: every step hook, metrics, schedules."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

FEATURES, CLASSES, ROWS = 4, 3, 8
Schedule = Literal["none", "step", "epoch", "plateau"]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.gelu(self.linear(self.norm(x)))


class Classifier(pl.LightningModule):
    """A batch is ``(x [rows, FEATURES], y [rows])``.

    In fp64 from the start: stock Lightning loads a checkpoint before it converts the module, so an fp32 one would
    round what was saved.
    """

    def __init__(
        self, width: int = 6, blocks: int = 2, learning_rate: float = 0.05, schedule: Schedule = "none"
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.stem = nn.Linear(FEATURES, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, CLASSES)
        self.train_accuracy = MulticlassAccuracy(CLASSES, average="micro")
        self.val_accuracy = MulticlassAccuracy(CLASSES, average="micro")
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        logits = self(x)
        loss = F.cross_entropy(logits, y)
        self.train_accuracy(logits, y)
        self.log("train_loss", loss, on_step=True, on_epoch=True, sync_dist=True, prog_bar=True)
        self.log("train_accuracy", self.train_accuracy, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        x, y = batch
        logits = self(x)
        self.val_accuracy(logits, y)
        self.log("val_loss", F.cross_entropy(logits, y), sync_dist=True, prog_bar=True)
        self.log("val_accuracy", self.val_accuracy)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        x, y = batch
        self.log("test_loss", F.cross_entropy(self(x), y), sync_dist=True)

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams["learning_rate"])
        match self.hparams["schedule"]:
            case "step":
                schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
                return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
            case "epoch":
                return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]
            case "plateau":
                schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
                return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val_loss"}}
        return optimizer


def dataset(rows: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, FEATURES, generator=generator).double()
    return TensorDataset(x, (x.sum(dim=1) > 0).long() + (x[:, 0] > 0.5).long())


class RankBatches:
    """This rank's rows of each global batch: ``ROWS`` rows, cut evenly over the ranks.

    One process with the whole batches sees the same data. A run may go on in mid-epoch, by the ``state_dict`` protocol
    that Lightning knows.
    """

    def __init__(self, rows: int, seed: int, rank: int, ranks: int) -> None:
        tensors = dataset(rows, seed).tensors
        self._batches = [
            tuple(part.chunk(ranks)[rank] for part in batch)
            for batch in zip(*(tensor.split(ROWS) for tensor in tensors), strict=True)
        ]
        self._start = self._position = 0

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        start, self._start = self._start % len(self), 0
        for index in range(start, len(self)):
            self._position = index + 1
            yield self._batches[index]

    def state_dict(self) -> dict[str, int]:
        return {"position": self._position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._start = state["position"]


class ClassifierData(pl.LightningDataModule):
    """Four training batches and two for each kind of evaluation, each of ``ROWS`` rows over all ranks together.

    Args:
        shuffle: leave the order of the training rows to a shuffling DataLoader, and their division to Lightning.
    """

    def __init__(self, shuffle: bool = False) -> None:
        super().__init__()
        self.shuffle = shuffle

    def setup(self, stage: str) -> None:
        assert self.trainer is not None
        self.rank, self.ranks = self.trainer.global_rank, self.trainer.world_size

    def train_dataloader(self) -> Any:
        if self.shuffle:
            return DataLoader(dataset(32, seed=1), batch_size=ROWS // self.ranks, shuffle=True)
        return RankBatches(32, 1, self.rank, self.ranks)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(dataset(16, seed=2), batch_size=ROWS // self.ranks)

    def test_dataloader(self) -> DataLoader[Any]:
        return self.val_dataloader()

    def predict_dataloader(self) -> DataLoader[Any]:
        return self.val_dataloader()
