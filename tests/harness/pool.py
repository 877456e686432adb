"""Run a function on several ranks, each a process with torch.distributed (gloo) initialised, in milliseconds."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import pickle
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from tests.harness.worker import STACKS_FILE, Failure, Job, decode
from tests.threads import ENVIRONMENT

REPOSITORY = Path(__file__).resolve().parents[2]
START_TIMEOUT = 180.0
# A rank that overruns notes its stack at the timeout; only then is it killed.
KILL_AFTER = 1.0
# Once a rank has failed, how long an earlier failure of another rank may still be on its way.
FAILURES_ARRIVE_WITHIN = 0.3


class WorkerError(RuntimeError):
    """A rank raised or died. The message holds the traceback of the rank that failed first.

    Attributes:
        rank: The rank that failed first.
        exception: Name of the exception's type, or None if the process died without one.
    """

    def __init__(self, message: str, rank: int, exception: str | None) -> None:
        super().__init__(message)
        self.rank = rank
        self.exception = exception


class WorkerTimeout(WorkerError):
    """A rank did not finish in time. The message tells where each rank stood."""


def run_distributed(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 60.0, fresh: bool = False
) -> list[Any]:
    """Run ``fn(*args)`` on ``world_size`` ranks and return their results, ordered by rank.

    Every rank is a process with a new process group over gloo, one thread, no CUDA devices, and a temporary working
    directory that all ranks of the call share and that is removed afterwards. The processes are those of earlier calls
    of the same test file, which saves a quarter of a small run; so a call must leave nothing behind in them, as a
    Trainer's run under a strategy promises, and one that does fails. Those that fail are not used again.

    Args:
        fn: A function that can be imported (top level of a module).
        args: Arguments that can be pickled.
        timeout: Seconds until the whole call is killed; also the timeout of the process group.
        fresh: Use new processes, and end them afterwards.

    Raises:
        WorkerError: A rank raised or died; nothing of the job is left running.
        WorkerTimeout: The time was up.
    """
    return _pool().run(fn, args, ranks=world_size, world_size=world_size, timeout=timeout, shared=not fresh)


def run_isolated(fn: Callable[..., Any], *args: Any, timeout: float = 60.0, fresh: bool = False) -> Any:
    """Run ``fn(*args)`` in one process without a process group: where single-process references come from."""
    return _pool().run(fn, args, ranks=1, world_size=0, timeout=timeout, shared=not fresh)[0]


@dataclass(frozen=True)
class _Crew:
    """Workers that do a job together."""

    pids: list[int]
    connections: list[Connection]


class WorkerPool:
    """The zygote process, the protocol with it, and the workers that wait for further jobs. One job at a time."""

    def __init__(self) -> None:
        self._control, control_of_zygote = socket.socketpair()
        self._control.settimeout(START_TIMEOUT)
        with control_of_zygote:
            self._zygote = subprocess.Popen(
                [sys.executable, "-m", "tests.harness.zygote", str(control_of_zygote.fileno())],
                cwd=REPOSITORY,
                env=_worker_environment(),
                pass_fds=[control_of_zygote.fileno()],
                start_new_session=True,  # Ctrl-C is for the test process, which then ends the workers
            )
        self._answers = self._control.makefile("rb")
        self._shared: dict[tuple[int, int], _Crew] = {}

    def run(
        self, fn: Callable[..., Any], args: Sequence[Any], *, ranks: int, world_size: int, timeout: float, shared: bool
    ) -> list[Any]:
        """Let ``ranks`` workers run ``fn(*args)``, and return their results."""
        if getattr(fn, "__module__", None) == "__main__":
            raise ValueError(
                f"{fn.__name__} is defined in a script; workers can only run functions that they can import"
            )
        call = pickle.dumps((fn, tuple(args)))
        scratch = Path(tempfile.mkdtemp(prefix="effi-test-"))
        directory = scratch / "work"
        directory.mkdir()
        kind = ranks, world_size
        # Taken out until all has gone well: who failed is not used again.
        crew = (self._shared.pop(kind, None) if shared else None) or self._fork(ranks)
        reports: dict[int, Any] = {}
        statuses: list[int | None] = [None] * ranks
        try:
            for rank, connection in enumerate(crew.connections):
                job = Job(call, tuple(sys.path), directory, scratch, rank, world_size, timeout, shared)
                connection.send_bytes(pickle.dumps(job))
            reports = _collect(crew.connections, timeout + KILL_AFTER)
        finally:
            if shared and len(reports) == ranks and not any(isinstance(r, Failure) for r in reports.values()):
                self._shared[kind] = crew
            else:
                statuses = self._end(crew)
            stacks = _read_stacks(scratch, ranks)
            shutil.rmtree(scratch, ignore_errors=True)
        _raise_first_failure(reports, statuses, stacks, timeout)
        return [reports[rank] for rank in range(ranks)]

    def end_shared(self) -> None:
        """End the workers that wait for shared jobs."""
        while self._shared:
            _, crew = self._shared.popitem()
            self._end(crew)

    def close(self) -> None:
        """End the zygote and with it every worker."""
        self._answers.close()
        self._control.close()
        self._zygote.wait()

    def _fork(self, ranks: int) -> _Crew:
        pairs = [socket.socketpair() for _ in range(ranks)]
        try:
            pids = self._command(b"F", [theirs.fileno() for _, theirs in pairs])
        finally:
            for _, theirs in pairs:
                theirs.close()
        return _Crew(pids, [Connection(ours.detach()) for ours, _ in pairs])

    def _end(self, crew: _Crew) -> list[int | None]:
        statuses = self._command(b"E" + json.dumps(crew.pids).encode() + b"\n")
        for connection in crew.connections:
            connection.close()
        return statuses

    def _command(self, command: bytes, descriptors: Sequence[int] = ()) -> list[Any]:
        socket.send_fds(self._control, [command], descriptors)
        line = self._answers.readline()
        if not line:
            raise RuntimeError(f"the process that workers are forked from ended with status {self._zygote.wait()}")
        return json.loads(line)


_the_pool: WorkerPool | None = None


def _pool() -> WorkerPool:
    global _the_pool
    if _the_pool is None:
        _the_pool = WorkerPool()
        atexit.register(close_pool)
    return _the_pool


def end_shared_workers() -> None:
    """End the processes of shared jobs, so that the next test file begins with fresh ones."""
    if _the_pool is not None:
        _the_pool.end_shared()


def close_pool() -> None:
    """End all processes of the harness. The next call starts anew."""
    global _the_pool
    if _the_pool is not None:
        _the_pool.close()
        _the_pool = None


def _worker_environment() -> dict[str, str]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "PYTEST_"))}
    # A forked process cannot use CUDA, and the same numbers should come out on a machine with GPUs.
    settings = {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "0"}
    return environment | ENVIRONMENT | settings


def _collect(connections: Sequence[Connection], timeout: float) -> dict[int, Any]:
    """Reports by rank. Ranks that died or did not report in time are missing."""
    rank_of = {connection: rank for rank, connection in enumerate(connections)}
    reports: dict[int, Any] = {}
    deadline = time.monotonic() + timeout
    waiting = set(connections)
    while waiting:
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for connection in ready:
            waiting.discard(connection)
            failed = True
            with contextlib.suppress(EOFError, ConnectionResetError):  # the process died; its status will tell
                report = reports[rank_of[connection]] = decode(connection.recv_bytes())
                failed = isinstance(report, Failure)
            if failed:
                deadline = min(deadline, time.monotonic() + FAILURES_ARRIVE_WITHIN)
    return reports


def _read_stacks(scratch: Path, ranks: int) -> dict[int, str]:
    files = {rank: scratch / STACKS_FILE.format(rank=rank) for rank in range(ranks)}
    return {rank: file.read_text() for rank, file in files.items() if file.exists()}


def _raise_first_failure(
    reports: dict[int, Any], statuses: Sequence[int | None], stacks: dict[int, str], timeout: float
) -> None:
    died = {rank: status for rank, status in enumerate(statuses) if rank not in reports and status is not None}
    failures = sorted((r for r in reports.values() if isinstance(r, Failure)), key=lambda f: f.raised_at)
    if died:
        # A death breaks the connections of its peers, so whatever they raised came after it.
        rank, status = next(iter(died.items()))
        others = "".join(f"\nthen rank {failure.rank} raised:\n{failure.traceback}" for failure in failures)
        raise WorkerError(f"the process of rank {rank} ended with status {status}{others}", rank, None)
    if failures:
        first = failures[0]
        message = f"rank {first.rank} of {len(statuses)} failed first:\n{first.traceback}"
        raise WorkerError(message, first.rank, first.exception)
    missing = [rank for rank in range(len(statuses)) if rank not in reports]
    if missing:
        where = "".join(f"\nrank {rank} stood at:\n{stacks.get(rank, '')}" for rank in missing)
        raise WorkerTimeout(f"ranks {missing} did not finish within {timeout} s{where}", missing[0], None)
