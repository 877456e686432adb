"""One rank of a job: runs the function, reports its result or its failure.

A worker is forked from the zygote with every import already done, and runs the jobs of one test file one after the
other, which saves forks and torch's first use of everything. Jobs therefore promise to leave nothing in their process
(``Trainer.fit`` under a strategy does), and ``remains`` holds them to it. Those that cannot promise it get workers of
their own.
"""

from __future__ import annotations

import faulthandler
import io
import os
import pickle
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
from torch import Tensor
from typing_extensions import override

from tests.harness.remains import Remains
from tests.threads import THREADS

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
        shared: Other jobs will run in the same process, so this one must leave nothing behind.
    """

    call: bytes
    import_path: tuple[str, ...]
    directory: Path
    scratch: Path
    rank: int
    world_size: int
    timeout: float
    shared: bool


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


class _TensorsAsBytes(pickle.Pickler):
    """Writes plain tensors as their bytes: an archive of torch costs ten times as much for each small tensor, and
    multiprocessing's own pickler hands over shared memory that vanishes with the worker."""

    @override
    def reducer_override(self, value: object) -> Any:
        if type(value) is not Tensor or value.layout is not torch.strided or value.device.type != "cpu":
            return NotImplemented
        content = value.detach().reshape(-1).view(torch.uint8).numpy().tobytes()
        return _tensor_from_bytes, (content, value.dtype, tuple(value.shape), value.requires_grad)


def _tensor_from_bytes(content: bytes, dtype: torch.dtype, shape: tuple[int, ...], requires_grad: bool) -> Tensor:
    flat = torch.frombuffer(bytearray(content), dtype=dtype) if content else torch.empty(0, dtype=dtype)
    return flat.reshape(shape).requires_grad_(requires_grad)


def encode(message: object) -> bytes:
    """Serialise a result."""
    buffer = io.BytesIO()
    _TensorsAsBytes(buffer, pickle.HIGHEST_PROTOCOL).dump(message)
    return buffer.getvalue()


def decode(data: bytes) -> Any:
    """Inverse of :func:`encode`; the bytes come from a worker of this test session, hence the full unpickler."""
    return pickle.loads(data)


def work(connection: Connection) -> None:
    """Run the jobs that arrive on ``connection``, report on each, and wait for the next or to be killed.

    The wait matters: a rank that went away while a peer is still inside a collective would make that peer fail.
    """
    torch.set_num_threads(THREADS)
    at_start = Remains.now()
    while True:
        job: Job = pickle.loads(connection.recv_bytes())
        at_start.put_back()
        with open(job.scratch / STACKS_FILE.format(rank=job.rank), "w") as stacks:
            faulthandler.dump_traceback_later(job.timeout, file=stacks)
            try:
                result = _call(job)
                if job.shared:
                    at_start.assert_nothing_left()
                report = encode(result)
            except BaseException as error:
                # SystemExit and KeyboardInterrupt are outcomes of a job like any other exception.
                report = encode(Failure(job.rank, time.monotonic(), type(error).__name__, traceback.format_exc()))
            connection.send_bytes(report)
            faulthandler.cancel_dump_traceback_later()


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
