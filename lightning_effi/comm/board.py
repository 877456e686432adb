"""Notes of each rank that the others can read without taking part in anything.

A collective needs every rank; after an error, or while a rank waits in one, nobody can say which ranks still come.
Notes go through the key-value store by which the process group was started.
"""

from __future__ import annotations

import json
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch.distributed as dist

from lightning_effi.compat import torch as torch_compat

_PATIENCE = 5.0  # seconds for one access: the store is in the memory of a rank that may be gone
_INTERVAL = 0.02


_runs: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # by default process group


class Board:
    """One note of each rank on each topic.

    Args:
        name: tells notes of one run from those of others; the same on all ranks.
        rank: of this process in the default process group, which must exist.
        size: how many ranks there are.
    """

    def __init__(self, name: str, rank: int, size: int) -> None:
        self._store = torch_compat.default_store(f"lightning_effi/{name}", _PATIENCE)
        self._rank = rank
        self.size = size
        self._is_gone = False  # the rank that holds the store, and with it all notes

    @classmethod
    def of_next_run(cls) -> Board:
        """A board without notes; ranks that have asked equally often get the same one."""
        group = dist.group.WORLD
        _runs[group] = _runs.get(group, 0) + 1
        return cls(f"run {_runs[group]}", dist.get_rank(), dist.get_world_size())

    def write(self, topic: str, note: Any) -> bool:
        """Leave this rank's note, which JSON can hold, in place of an earlier one; ``False`` if nobody can read it."""
        self._access(lambda: self._store.set(f"{topic}/{self._rank}", json.dumps(note)))
        return not self._is_gone

    def read(self, topic: str) -> dict[int, Any]:
        """The notes that are there, by rank."""
        notes: dict[int, Any] = {}
        for rank in range(self.size):
            note = self._access(partial(self._note, f"{topic}/{rank}"))
            if note is not None:
                notes[rank] = json.loads(note)
        return {} if self._is_gone else notes

    def wait(self, topic: str, seconds: float) -> dict[int, Any]:
        """The notes of all ranks, or of those that have left one when the time is over."""
        deadline = time.monotonic() + seconds
        while len(notes := self.read(topic)) < self.size and time.monotonic() < deadline and not self._is_gone:
            time.sleep(_INTERVAL)
        return notes

    def settle(self, topic: str, text: str) -> None:
        """Leave ``text`` for all ranks, unless one has settled ``topic`` before."""
        self._access(lambda: self._store.compare_set(topic, "", text))

    def settled(self, topic: str) -> str | None:
        """What one rank has settled for all."""
        text = self._access(partial(self._note, topic))
        return None if text is None else text.decode()

    def _note(self, key: str) -> bytes | None:
        return self._store.get(key) if self._store.check([key]) else None

    def _access(self, call: Callable[[], Any]) -> Any:
        if self._is_gone:
            return None
        try:
            return call()
        except RuntimeError:  # of all kinds, by store
            self._is_gone = True
            return None
