"""A Python interpreter that has imported torch and Lightning, and runs each command in a fork of itself.

``python warm_server.py <path of a socket> <control descriptor>``. A command costs five seconds of imports otherwise,
and each process that Lightning starts for it too. Nothing of this repository is imported beforehand, so that a command
finds what it would find in an interpreter of its own. The server ends, and its commands with it, when the other end of
the control descriptor is closed.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import multiprocessing.process
import os
import runpy
import selectors
import signal
import socket
import sys
from types import ModuleType
from typing import Any

PRELOADED = (
    "torch",
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint.state_dict",
    "torch.utils.tensorboard",
    "lightning.pytorch",
    "lightning.pytorch.cli",
    "rich.progress",
)


def main() -> None:
    path, control = sys.argv[1], socket.socket(fileno=int(sys.argv[2]))
    own = sys.path[1:]  # without the folder of this script
    for name in PRELOADED:
        with contextlib.suppress(ImportError):  # an optional one is missed by the command that needs it
            importlib.import_module(name)
    importlib.import_module("torch").set_num_threads(1)
    gc.collect()
    gc.freeze()  # so that no collection in a fork copies what the imports made
    command = serve(path, control)
    if command is not None:
        run(command, own)


def serve(path: str, control: socket.socket) -> dict[str, Any] | None:
    """Fork for each connection; returns the command in the fork, and nothing at the end of the server."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    woken, waker = socket.socketpair()
    waker.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(waker.fileno())
    control.sendall(b"!")  # ready
    selector = selectors.DefaultSelector()
    for source in (control, listener, woken):
        selector.register(source, selectors.EVENT_READ)
    clients: dict[int, socket.socket] = {}
    try:
        while True:
            for key, _ in selector.select():
                source: Any = key.fileobj
                if source is control:
                    return None
                if source is listener:
                    client, command = _accept(listener)
                    pid = os.fork()
                    if pid == 0:
                        clients = {}
                        signal.set_wakeup_fd(-1)
                        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                        for opened in (client, listener, control, woken, waker, selector):
                            opened.close()
                        return command
                    for descriptor in command["descriptors"]:
                        os.close(descriptor)
                    clients[pid] = client
                    selector.register(client, selectors.EVENT_READ, pid)
                elif source is woken:
                    woken.recv(4096)
                    _report_ended(clients, selector)
                else:
                    _forward(key.data, source, clients, selector)
    finally:
        for pid in clients:
            _kill(pid, signal.SIGKILL)


def _accept(listener: socket.socket) -> tuple[socket.socket, dict[str, Any]]:
    client, _ = listener.accept()
    received, descriptors, _, _ = socket.recv_fds(client, 1 << 16, 3)
    while not received.endswith(b"\n"):
        received += client.recv(1 << 16)
    return client, {**json.loads(received), "descriptors": descriptors}


def _report_ended(clients: dict[int, socket.socket], selector: selectors.BaseSelector) -> None:
    for pid in list(clients):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            client = clients.pop(pid)
            selector.unregister(client)
            with contextlib.suppress(OSError):  # nobody waits any more
                client.sendall(str(os.waitstatus_to_exitcode(status)).encode())
            client.close()


def _forward(
    pid: int, client: socket.socket, clients: dict[int, socket.socket], selector: selectors.BaseSelector
) -> None:
    """Signals that the client was sent, and its own end."""
    numbers = client.recv(16)
    for number in numbers:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
    if not numbers:
        _kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        selector.unregister(clients.pop(pid))
        client.close()


def _kill(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def run(command: dict[str, Any], own: list[str]) -> None:
    """Be the interpreter that the command asked for; what it raises ends this process as it would that one."""
    os.setsid()
    for number, descriptor in enumerate(command["descriptors"]):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(command["folder"])
    os.environ.clear()
    os.environ.update(command["environment"])
    if (threads := int(os.environ["OMP_NUM_THREADS"])) != 1:  # torch has read it when it was imported
        importlib.import_module("torch").set_num_threads(threads)
    sys.executable = command["executable"]
    added = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    sys.path[:] = [*added, *(entry for entry in own if entry not in added)]
    multiprocessing.process.ORIGINAL_DIR = command["folder"]  # where it was imported, as spawned processes are told
    _know_the_rank()
    kind, *sys.argv = command["arguments"]
    if kind == "-m":
        sys.path.insert(0, os.getcwd())
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        return
    main_module = sys.modules["__main__"] = ModuleType("__main__")
    if kind == "-c":
        code, sys.argv[0] = sys.argv[0], "-c"
        sys.path.insert(0, "")
        exec(compile(code, "<string>", "exec"), vars(main_module))
        return
    sys.argv.insert(0, kind)
    main_module.__file__ = kind
    sys.path.insert(0, os.path.dirname(os.path.realpath(kind)))
    with open(kind, "rb") as script:
        exec(compile(script.read(), kind, "exec"), vars(main_module))


def _know_the_rank() -> None:
    """Lightning reads it from the environment when it is imported."""
    from lightning.fabric.utilities.rank_zero import _get_rank, rank_zero_only

    rank_zero_only.rank = _get_rank() or 0


if __name__ == "__main__":
    main()
