"""One rank of one job, in a process of its own: runs the function, reports its result or its failure.

A worker is forked from the zygote with every import already done, runs exactly one job and is killed by the zygote
once all ranks have reported. A fresh fork costs less than cleaning a used process would, and no job can see what an
earlier one left behind (environment variables, process groups, random states, patched classes).
"""

from __future__ import annotations

import faulthandler
import io
import os
import pickle
import signal
import sys
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

STACKS_FILE = "stacks-of-rank-{rank}.txt"


@dataclass(frozen=True)
class Job:
    """What one rank has to run.

    Attributes:
        call: Pickled ``(fn, args)``; a second layer, because it can be read only after ``import_path`` is in place.
        import_path: ``sys.path`` of the test process, so that test modules are importable under the same names.
        directory: Working directory of the function, one for all ranks of the job.
        scratch: Directory of the harness itself: rendezvous file and the stacks of ranks that ran out of time.
        world_size: Number of ranks; 0 means one process without a process group.
        timeout: Seconds after which the rank writes down where it stands.
    """

    call: bytes
    import_path: tuple[str, ...]
    directory: Path
    scratch: Path
    rank: int
    world_size: int
    timeout: float


@dataclass(frozen=True)
class Failure:
    """An exception that ended a rank's job.

    Attributes:
        raised_at: ``time.monotonic()``, one clock for all processes of the machine: the rank that failed first is the
            cause, the others are its victims.
    """

    rank: int
    raised_at: float
    exception: str
    traceback: str


def encode(message: object) -> bytes:
    """Serialise a result with ``torch.save``: unlike multiprocessing's own pickler, it copies tensors into the bytes
    instead of handing over shared memory that vanishes with the worker."""
    buffer = io.BytesIO()
    torch.save(message, buffer)
    return buffer.getvalue()


def decode(data: bytes) -> Any:
    """Inverse of :func:`encode`; the bytes come from a worker of this test session, hence the full unpickler."""
    return torch.load(io.BytesIO(data), weights_only=False)


def work(connection: Connection) -> None:
    """Run the job that arrives on ``connection``, report on it, and wait to be killed.

    The wait matters: a rank that went away while a peer is still inside a collective would make that peer fail.
    """
    job: Job = pickle.loads(connection.recv_bytes())
    with open(job.scratch / STACKS_FILE.format(rank=job.rank), "w") as stacks:
        faulthandler.dump_traceback_later(job.timeout, file=stacks)
        try:
            report = encode(_call(job))
        except BaseException as error:
            # SystemExit and KeyboardInterrupt are outcomes of a job like any other exception.
            report = encode(Failure(job.rank, time.monotonic(), type(error).__name__, traceback.format_exc()))
        connection.send_bytes(report)
        while True:
            signal.pause()


def _call(job: Job) -> Any:
    os.chdir(job.directory)
    sys.path[:] = job.import_path
    fn, args = pickle.loads(job.call)
    if job.world_size > 0:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(str(job.scratch / "rendezvous"), job.world_size),
            rank=job.rank,
            world_size=job.world_size,
            timeout=timedelta(seconds=job.timeout),
        )
    return fn(*args)
