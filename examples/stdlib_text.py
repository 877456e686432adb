"""Real text that is on every machine: the sources of Python's standard library, as bytes."""

import sysconfig
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset


def read_standard_library(max_bytes: int) -> bytes:
    """The first ``max_bytes`` bytes of the top-level modules' sources, in the order of their file names.

    Raises:
        FileNotFoundError: This Python carries its library without sources (in an archive, say).
    """
    folder = Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for path in sorted(folder.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= max_bytes:
            break
    if not text:
        raise FileNotFoundError(f"no Python sources in {folder}; this demonstration trains on them")
    return bytes(text[:max_bytes])


class StdlibText(pl.LightningDataModule):
    """Byte-level language modelling: batches of int64 tokens ``[batch_size, context + 1]``.

    Args:
        context: Tokens that the model sees; each sample has one more, the last target.
        batch_size: Samples per process and step.
        max_bytes: How much text is read.
        validation_fraction: Share of the text, from its end, that is kept for validation.
    """

    def __init__(
        self, context: int = 128, batch_size: int = 16, max_bytes: int = 4_000_000, validation_fraction: float = 0.02
    ) -> None:
        super().__init__()
        self.context = context
        self.batch_size = batch_size
        self.max_bytes = max_bytes
        self.validation_fraction = validation_fraction

    def setup(self, stage: str) -> None:
        text = torch.frombuffer(bytearray(read_standard_library(self.max_bytes)), dtype=torch.uint8).long()
        size = self.context + 1
        samples = text[: len(text) // size * size].view(-1, size)
        held_out = max(1, round(len(samples) * self.validation_fraction))
        self.train_samples, self.validation_samples = samples[:-held_out], samples[-held_out:]

    def train_dataloader(self) -> DataLoader:
        return self._loader(self.train_samples, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return self._loader(self.validation_samples, shuffle=False)

    test_dataloader = val_dataloader

    def _loader(self, samples: Tensor, shuffle: bool) -> DataLoader:
        return DataLoader(TensorDataset(samples), self.batch_size, shuffle=shuffle, collate_fn=_stack)


def _stack(samples: list[tuple[Tensor]]) -> Tensor:
    return torch.stack([sample for (sample,) in samples])
