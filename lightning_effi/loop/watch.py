"""A wait that some ranks have entered alone is an error within seconds, and names the lines.

A thread looks once a second whether this process stands still inside a collective. Only then it says so to the others,
through the key-value store, and reads what they say. A slow rank says nothing, and nothing is said of it. Where ranks
wait for each other (see :mod:`lightning_effi.loop.deadlock`) one of them settles the sentence for all, and each shuts
down its connections to the others, since a thread in a collective listens to nothing else: the error of the collective
then becomes that sentence.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any

from lightning_effi.comm.board import Board
from lightning_effi.comm.waiting import awaited
from lightning_effi.compat import torch as torch_compat
from lightning_effi.loop.connections import connections, shut_down
from lightning_effi.loop.deadlock import Standing, deadlock, sentence
from lightning_effi.modules.user_code import frames_of, frames_of_traceback, is_in_torch, line_in_a_run

Recorded = Sequence[tuple[torch_compat.Message, Sequence[torch_compat.Frame]]]

_INTERVAL = 1.0  # seconds between two looks
_PATIENCE = 4  # looks at the same place, after which a rank says where it stands
_LAST_RESORT = 10  # looks, after which a process that cannot be woken is ended
_READERS = 16  # up to so many ranks all read at each look; more of them take turns

_HISTORY = 500  # messages of the current batch that are compared at most
_BETWEEN_BATCHES = "_end_together"  # in which all ranks have done the same

_DOINGS = {
    "_engine_run_backward": "in backward",
    "optimizer_step": "in the optimizer's step",
    "save_checkpoint": "while a checkpoint is saved",
    _BETWEEN_BATCHES: "before the next batch",
    "take_apart": "at the end of the run",
}


class Watch:
    """Watches the thread that makes it, for the length of a run.

    Args:
        board: notes of this run's ranks.
        rank: of this process.
    """

    def __init__(self, board: Board, rank: int) -> None:
        self._board, self._rank = board, rank
        self._watched = threading.get_ident()
        self._since = time.time_ns()
        self._over = threading.Event()
        self._seen: Any = None
        self._looks = 0  # at what has been seen
        self._standing: Standing | None = None
        self._suspected: Mapping[int, int] = {}  # beats of ranks that seemed to wait for each other
        self._woken_at: int | None = None
        self._error = ""
        self._thread = threading.Thread(target=self._run, name="lightning_effi watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """The run is over, and whoever waits for this rank waits in vain."""
        self._over.set()
        self._thread.join()
        entered = _entered(*torch_compat.recorded_messages(self._since, places=False))
        ended = Standing(0, entered, {}, [], None, self._error, has_ended=True)
        self._board.write("connections", connections())  # the process may live on, and its connections with it
        self._board.write("standing", ended.noted())

    def note(self, exception: BaseException) -> None:
        """The run is about to end in ``exception``, which ranks that wait for this one are told."""
        lines = str(exception).strip().splitlines()
        place = line_in_a_run(reversed(frames_of_traceback(exception.__traceback__)))
        self._error = f" in {type(exception).__name__}{f': {lines[0]}' if lines else ''}{place}"

    def explain(self, exception: BaseException) -> bool:
        """Say in ``exception`` what it came from, if it came from ranks that waited for each other.

        Returns:
            whether it did.
        """
        verdict = self._board.settled("deadlock")
        if verdict is None:
            return False
        # of a connection that was shut down, which planning may have taken for an error of the module
        if isinstance(exception, RuntimeError) or "/gloo/" in str(exception):
            exception.args = (verdict,)
        else:
            exception.add_note(f"lightning_effi: {verdict}")
        return True

    def _run(self) -> None:
        while not self._over.wait(_INTERVAL):
            self._look()

    def _look(self) -> None:
        frame = sys._current_frames().get(self._watched)
        seen = (torch_compat.message_counts(), awaited(), id(frame), None if frame is None else frame.f_lasti)
        if seen != self._seen:
            if self._standing is not None:
                self._board.write("standing", None)
            self._seen, self._looks, self._standing, self._suspected = seen, 0, None, {}
            return
        self._looks += 1
        if self._looks < _PATIENCE or frame is None or not is_in_torch(frame.f_code.co_filename):
            return
        if self._standing is None:
            self._standing = self._stands(frame)
        if self._standing.messages or self._standing.awaits is not None:
            self._standing = self._standing._replace(beat=self._looks)
            self._board.write("standing", self._standing.noted())
            self._compare()

    def _stands(self, frame: FrameType) -> Standing:
        recorded, is_all = torch_compat.recorded_messages(self._since)
        history = _this_batch(recorded)
        self._board.write("history", history)
        return Standing(
            beat=self._looks,
            entered=_entered(recorded, is_all),
            members=torch_compat.group_members(),
            messages=[message for message in history if message.is_open],
            awaits=awaited(),
            place=_place([*frames_of(frame)]),
        )

    # -- what all say together ---------------------------------------------------------------------------------------

    def _compare(self) -> None:
        if self._woken_at is not None:
            if self._looks - self._woken_at > _LAST_RESORT:
                self._end_process()
            return
        if self._board.settled("deadlock") is None and not self._settle():
            return
        self._woken_at = self._looks
        self._board.write("connections", connections())
        others = self._board.wait("connections", _PATIENCE * _INTERVAL)
        ends = {(here, there) for rank, pairs in others.items() if rank != self._rank for here, there in pairs}
        shut_down(ends, besides_port=torch_compat.store_port())

    def _settle(self) -> bool:
        """Whether ranks wait for each other: seen twice, and each of them has stood there in between."""
        if self._looks % (1 + self._board.size // _READERS):
            return False
        notes = self._board.read("standing")
        standings = {rank: Standing.of(note) for rank, note in notes.items() if note is not None}
        ranks = deadlock(standings)
        before, self._suspected = self._suspected, {rank: standings[rank].beat for rank in ranks or ()}
        if ranks is None or before.keys() != self._suspected.keys():
            return False
        if not all(standings[rank].has_ended or standings[rank].beat > before[rank] for rank in ranks):
            self._suspected = before
            return False
        told = self._board.read("history")
        histories = {rank: [torch_compat.Message(*message) for message in told.get(rank, ())] for rank in ranks}
        self._board.settle("deadlock", sentence(ranks, standings, histories))
        return True

    def _end_process(self) -> None:
        """Where a wait cannot be broken, the process is ended: nobody will ever come to it."""
        print(f"lightning_effi: {self._board.settled('deadlock')}", file=sys.stderr, flush=True)
        os._exit(1)


def _entered(recorded: Recorded, is_all: bool) -> dict[str, int]:
    """By group, the number of the last message; of groups that have been used before what is recorded, nothing."""
    entered = dict.fromkeys(torch_compat.group_members(), 0) if is_all else {}
    return entered | {message.group: message.number for message, _ in recorded}


def _this_batch(recorded: Recorded) -> list[torch_compat.Message]:
    """The latest messages since all ranks met before a batch, with the places where they were entered."""
    history: list[torch_compat.Message] = []
    for message, frames in reversed(recorded[-_HISTORY:]):
        if not message.is_open and any(name == _BETWEEN_BATCHES for _, _, name in frames):
            break
        history.insert(0, message._replace(place=_place(frames)))
    return history


def _place(frames: Sequence[torch_compat.Frame]) -> str:
    line = line_in_a_run(frames)
    return line or next((f" ({_DOINGS[name]})" for _, _, name in frames if name in _DOINGS), " (between steps)")
