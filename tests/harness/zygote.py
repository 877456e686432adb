"""The warm process that all workers are forked from: ``python -m tests.harness.zygote <control fd>``.

Importing torch, Lightning and transformers costs seconds; a fork of a process that has imported them costs
milliseconds. The zygote therefore imports everything once, starts no thread, and obeys two one-byte commands on its
control socket, each answered with one JSON line:

* ``F`` with n file descriptors: fork n workers, the i-th of which talks over the i-th descriptor → their pids.
* ``E`` and a JSON line of pids: kill these workers, with everything they started → exit status of each that had ended
  before (else null).

When the control socket closes, because the test process is gone, the workers are killed and the zygote ends.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import json
import os
import signal
import socket
import sys
from multiprocessing.connection import Connection

import torch

from tests.harness.worker import work

FORK, END = b"F", b"E"
MAX_WORKERS = 64

# What jobs import, directly or lazily. Those that are not installed are left out.
PRELOADED = (
    "lightning.pytorch",
    "lightning.pytorch.cli",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed._composable.replicate",
    "torch._dynamo",
    "torchmetrics",
    "transformers.models.llama.modeling_llama",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.bert.modeling_bert",
    "peft",
    "timm",
    "lightning_effi",
    "lightning_effi.strategy",
    "tests.harness.training",
    "tests.models",
)


def main(control: socket.socket) -> None:
    torch.set_num_threads(1)  # more would start threads, which forks lose; workers set their own number
    for name in PRELOADED:
        # Whatever is wrong with a module is the concern of the jobs that import it: they show the traceback.
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    # A collection in a worker would otherwise write into the header of every object that the imports made, and the
    # kernel would copy all their memory: a quarter of what a short job costs.
    gc.collect()
    gc.freeze()
    workers: set[int] = set()
    try:
        while True:
            command, descriptors, _, _ = socket.recv_fds(control, 1, MAX_WORKERS)
            if command == FORK:
                forked = [_fork(i, descriptors, control) for i in range(len(descriptors))]
                workers.update(forked)
                for descriptor in descriptors:
                    os.close(descriptor)
                answer: list[int | None] = list(forked)
            elif command == END:
                ended = json.loads(_read_line(control))
                answer = [_end(worker) for worker in ended]
                workers.difference_update(ended)
            else:
                return
            control.sendall(json.dumps(answer).encode() + b"\n")
    finally:
        for worker in workers:
            _end(worker)


def _read_line(control: socket.socket) -> bytes:
    line = b""
    while not line.endswith(b"\n"):
        line += control.recv(1)  # a byte at a time: what follows the line may come with descriptors
    return line


def _fork(index: int, descriptors: list[int], control: socket.socket) -> int:
    pid = os.fork()
    if pid == 0:
        _become_worker(index, descriptors, control)
    with contextlib.suppress(PermissionError, ProcessLookupError):
        os.setpgid(pid, pid)  # also done by the child: whoever comes first
    return pid


def _become_worker(index: int, descriptors: list[int], control: socket.socket) -> None:
    try:
        os.setpgid(0, 0)  # a process group of its own, so that killing it takes its children along
        control.close()
        for i, descriptor in enumerate(descriptors):
            if i != index:
                os.close(descriptor)  # the end of a worker is seen by the closing of its descriptor
        work(Connection(descriptors[index]))
    finally:
        os._exit(1)  # never return into the zygote's loop


def _end(pid: int) -> int | None:
    """Kill a worker and its children; its exit status if it had ended by itself, as ``subprocess`` gives it."""
    ended, status = os.waitpid(pid, os.WNOHANG)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    if ended:
        return os.waitstatus_to_exitcode(status)
    os.waitpid(pid, 0)
    return None


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
