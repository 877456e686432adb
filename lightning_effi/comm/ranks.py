"""Which ranks a word means: ``trainer.world_size``, ``torch.distributed``'s default group, ``trainer.global_rank``.

Code that trains through Lightning was written for ranks of which each has a batch of its own. It counts them with
``trainer.world_size`` and adds up over torch's default group. Ranks that hold parts of one model would be counted as
well, and a loss or a metric would come out as many times too large. So inside the module's hooks these words stand for
the data-parallel ranks, and everywhere else for the processes.
"""

from __future__ import annotations

import functools
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from lightning_effi.compat import torch as torch_compat

F = TypeVar("F", bound=Callable[..., Any])

_NOT_THE_USERS = ("lightning_effi.", "lightning.", "pytorch_lightning.", "torch.")


@dataclass(frozen=True)
class Ranks:
    """Ranks of one kind: how many, which of them this process is, and the group by which they talk."""

    size: int
    rank: int
    group_name: str

    @property
    def group(self) -> Any:
        """Held by name, like all groups that outlast a run."""
        return torch_compat.group_named(self.group_name)


class _Meaning(NamedTuple):
    """Whether counts are of data-parallel ranks, whether data are being shared out, and what is running."""

    counts: bool = False
    shares_out: bool = False
    in_step: bool = False
    in_hook: bool = False


class RankWords:
    """What the words mean at the moment; until :meth:`start` there is only one meaning."""

    def __init__(self) -> None:
        self.process: Ranks | None = None
        self._data_parallel: Ranks | None = None
        self._now = _Meaning()
        self._asked: _Asked | None = None

    def start(self, process: Ranks, data_parallel: Ranks) -> None:
        """From here on processes and data-parallel ranks are told apart."""
        self.process, self._data_parallel = process, data_parallel

    @property
    def differ(self) -> bool:
        """Whether there are ranks that work on one batch together."""
        return (
            self.process is not None
            and self._data_parallel is not None
            and self.process.size != self._data_parallel.size
        )

    @property
    def in_step(self) -> bool:
        """Whether the module's step is running, to whose end some ranks of a pipeline do not come."""
        return self._now.in_step

    @property
    def in_hook(self) -> bool:
        """Whether another hook of the module or of a callback is running."""
        return self._now.in_hook

    # -- what is answered --------------------------------------------------------------------------------------------

    @property
    def size(self) -> int:
        """What ``trainer.world_size`` counts."""
        assert self.process is not None
        assert self._data_parallel is not None
        if not self._now.counts:
            return self.process.size
        self.note_count("trainer.world_size")
        return self._data_parallel.size

    @property
    def rank(self) -> int:
        """What ``trainer.global_rank`` names: a process, except in hooks that share out data."""
        assert self.process is not None
        assert self._data_parallel is not None
        if self._now.shares_out:
            return self._data_parallel.rank
        return self.process.rank if self._asked is None else self._asked.rank(self.process.rank)

    def devices(self, devices: int, nodes: int) -> int:
        """How many of this node's ``devices`` count, so that times the number of nodes it is the world size."""
        if not self._now.counts or self._data_parallel is None:
            return devices
        self.note_count("trainer.num_devices")
        return max(self._data_parallel.size // nodes, 1)

    @property
    def group(self) -> Any:
        """Over which the strategy's own barriers and broadcasts go; behind a pipeline's blocks not everybody comes."""
        assert self.process is not None
        if self.in_step and self._data_parallel is not None:
            return self._data_parallel.group
        return self.process.group

    def note_count(self, word: str) -> None:
        """A step has used a word that counts data-parallel ranks."""
        if self._asked is not None:
            self._asked.counts.setdefault(word, None)

    # -- whose code runs ---------------------------------------------------------------------------------------------

    @contextmanager
    def data_parallel(self, *, shares_out: bool = False) -> Iterator[None]:
        """Inside runs a hook of the module that is about data, losses or updates.

        Args:
            shares_out: the hook shares out data, for which ``trainer.global_rank`` is the data-parallel rank.
        """
        assert self._data_parallel is not None
        with self._meaning(_Meaning(True, shares_out, in_step=self.in_step, in_hook=not self.in_step)):
            yield

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Inside runs a step of the module.

        Raises:
            RuntimeError: on the ranks concerned, where it takes a process for a place among data-parallel ranks.
        """
        before, self._asked = self._asked, _Asked()
        try:
            with self._meaning(_Meaning(True, in_step=True)):
                yield
        except Exception as error:
            self._asked.refuse_mixture(name, error)
            raise
        else:
            self._asked.refuse_mixture(name)
        finally:
            self._asked = before

    @contextmanager
    def after_loops(self) -> Iterator[None]:
        """Inside runs a hook of the module that is about processes."""
        with self._meaning(_Meaning(in_hook=True)):
            yield

    @contextmanager
    def processes(self) -> Iterator[None]:
        """Inside runs code of the package or of Lightning that a hook has called."""
        with self._meaning(_Meaning()):
            yield

    @contextmanager
    def _meaning(self, meaning: _Meaning) -> Iterator[None]:
        before, self._now = self._now, meaning
        ranks = self._data_parallel if meaning.counts else self.process
        is_other = meaning.counts != before.counts and ranks is not None
        try:
            with torch_compat.default_group(ranks.group) if is_other and ranks is not None else nullcontext():
                yield
        finally:
            self._now = before


class _Asked:
    """What one run of a step has asked for."""

    def __init__(self) -> None:
        self.counts: dict[str, None] = {}
        self._ranks: list[_ProcessRank] = []

    def rank(self, rank: int) -> int:
        self._ranks.append(_ProcessRank(rank, line_of_user()))
        return self._ranks[-1]

    def refuse_mixture(self, step: str, error: Exception | None = None) -> None:
        used = next((rank for rank in self._ranks if not rank.is_told_apart), None)
        if used is None or not self.counts:
            return
        raise RuntimeError(
            f"{step} uses trainer.global_rank ({used.line}) together with {next(iter(self.counts))}. With tensor and"
            " pipeline parallelism the former names one process, also of those that work on one batch together, and"
            " the latter counts the different batches. Use trainer.strategy.data_parallel_rank, or"
            " torch.distributed.get_rank(), in its place"
        ) from error


class _ProcessRank(int):
    """The rank of a process, that knows whether it was only compared or printed (``if self.global_rank == 0``)."""

    line: str
    is_told_apart: bool

    def __new__(cls, rank: int, line: str) -> _ProcessRank:
        self = super().__new__(cls, rank)
        self.line, self.is_told_apart = line, False
        return self

    def __eq__(self, other: object) -> bool:
        self.is_told_apart = True
        return int.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        self.is_told_apart = True
        return int.__ne__(self, other)

    def __gt__(self, other: int) -> bool:
        self.is_told_apart = True
        return int.__gt__(self, other)

    def __lt__(self, other: int) -> bool:
        self.is_told_apart = True
        return int.__lt__(self, other)

    def __bool__(self) -> bool:
        self.is_told_apart = True
        return int.__bool__(self)

    def __format__(self, spec: str) -> str:
        self.is_told_apart = True
        return int.__format__(int(self), spec)

    def __repr__(self) -> str:
        self.is_told_apart = True
        return int.__repr__(self)

    __str__ = __repr__
    __hash__ = int.__hash__


def for_processes(method: F) -> F:
    """A method of a strategy that hooks of the module may call, and that is about all processes."""

    @functools.wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self.words.processes():
            return method(self, *args, **kwargs)

    return run  # type: ignore[return-value]


def line_of_user() -> str:
    """Where the innermost code runs that is neither this package's nor Lightning's nor torch's."""
    frame = sys._getframe(1)
    while frame is not None:
        if not str(frame.f_globals.get("__name__", "")).startswith(_NOT_THE_USERS):
            [line] = traceback.extract_stack(frame, limit=1)
            return f"{line.filename}:{line.lineno}: {line.line}"
        frame = frame.f_back  # type: ignore[assignment]
    return "an unknown line"
