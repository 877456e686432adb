"""After an error: do the other ranks still answer?

Ranks that have all failed at the same point of their messages (a bug that every rank meets, Ctrl-C, a signal) can
gather the module once more, so that it is an ordinary one for whatever the caller does next. A rank that failed alone
can only take back what is its own.
"""

from __future__ import annotations

from lightning_effi.comm.board import Board
from lightning_effi.compat import torch as torch_compat

GRACE_SECONDS = 5.0


def failed_together(board: Board | None) -> bool:
    """Whether all ranks are here, after equally many messages in each process group.

    Args:
        board: of this run; ``None`` where this process is the only one.
    """
    if board is None:
        return True
    if not board.write("failed", torch_compat.message_counts()):
        return False
    notes = board.wait("failed", GRACE_SECONDS)
    if len(notes) < board.size:
        return False
    counts: dict[str, set[int]] = {}
    for note in notes.values():
        for group, count in note.items():
            counts.setdefault(group, set()).add(count)
    return all(len(of_group) == 1 for of_group in counts.values())
