"""For whom a rank waits that receives a message of one other rank.

Torch records collectives, and who is missing in one follows from their numbers. It does not record messages from one
rank to another, so whoever waits for one says so here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_sources: list[int] = []


@contextmanager
def waiting_for(rank: int) -> Iterator[None]:
    """Inside, this process waits until ``rank``, counted among all, sends something."""
    _sources.append(rank)
    try:
        yield
    finally:
        _sources.pop()


def awaited() -> int | None:
    """For which rank this process waits at the moment."""
    return _sources[-1] if _sources else None
