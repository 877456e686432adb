"""The same number of batches on all data-parallel ranks.

A rank that runs out of data leaves the others waiting in a collective. Loaders whose lengths are known and equal are
left alone; with others the ranks agree before every batch whether all of them have one, and stop together.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from lightning_effi.comm.agreement import Agreement


def agree_on_length(dataloader: Any, group: Any) -> Any:
    """``dataloader`` itself, or a stand-in that ends on all ranks of ``group`` when the shortest one ends."""
    if group is None or dist.get_world_size(group) == 1:
        return dataloader
    agreement = Agreement(group)
    lengths = agreement.gather(_length(dataloader))
    if None not in lengths and len(set(lengths)) == 1:
        return dataloader
    return AgreedLoader(dataloader, agreement, None if None in lengths else min(lengths))


class AgreedLoader:
    """Yields a batch only when every rank has one; everything else is the wrapped loader's."""

    def __init__(self, loader: Any, agreement: Agreement, length: int | None) -> None:
        self._loader = loader
        self._agreement = agreement
        self._length = length

    def __iter__(self) -> Iterator[Any]:
        nothing = object()
        batches = iter(self._loader)
        while True:
            batch = next(batches, nothing)
            if self._agreement.any([batch is nothing])[0]:
                return
            yield batch

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError(f"{type(self._loader).__name__} has no length that is known on all ranks")
        return self._length

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def _length(dataloader: Any) -> int | None:
    """``None`` where Lightning would not know it either: an iterable dataset's own ``__len__`` may be off."""
    from lightning.fabric.utilities.data import sized_len

    return sized_len(dataloader)
