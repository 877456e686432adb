"""Waking a thread that waits in gloo: a message over a connection that has been shut down is an error at once."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Collection, Iterator
from contextlib import closing
from pathlib import Path

Ends = tuple[str, str]  # address and port here, and at the other process

_OPEN = Path("/proc/self/fd")


def connections() -> list[Ends]:
    """The ends of this process's TCP connections; none where the system does not list open files."""
    return [ends for ends, _ in _connections()]


def shut_down(others: Collection[Ends], besides_port: int | None) -> int:
    """Shut down the connections of which the other ends are among ``others``.

    Args:
        others: the connections of other ranks, as they see them.
        besides_port: of the key-value store, whose connections stay.

    Returns:
        how many there were.
    """
    count = 0
    for (here, there), connection in _connections():
        if (there, here) in others and f":{besides_port}" not in (here[here.rindex(":") :], there[there.rindex(":") :]):
            connection.shutdown(socket.SHUT_RDWR)
            count += 1
    return count


def _connections() -> Iterator[tuple[Ends, socket.socket]]:
    for name in os.listdir(_OPEN) if _OPEN.exists() else ():
        if (connection := _socket(int(name))) is None:
            continue
        with closing(connection):
            if connection.type == socket.SOCK_STREAM and connection.family in (socket.AF_INET, socket.AF_INET6):
                try:
                    ends = _text(connection.getsockname()), _text(connection.getpeername())
                except OSError:  # it listens, or its other end is gone
                    continue
                yield ends, connection


def _socket(descriptor: int) -> socket.socket | None:
    """A second handle of an open socket; ``None`` for other files, and for one that has been closed meanwhile."""
    try:
        return socket.socket(fileno=os.dup(descriptor)) if stat.S_ISSOCK(os.fstat(descriptor).st_mode) else None
    except OSError:
        return None


def _text(address: tuple[str, int]) -> str:
    return f"{address[0].removeprefix('::ffff:')}:{address[1]}"
