"""Run a command the way a user would, with a hard limit on everything it starts."""

import atexit
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from tests.threads import ENVIRONMENT

ROOT = Path(__file__).parents[2]
SCRIPTS = Path(sys.executable).parent
_HERE = Path(__file__).parent
_CONSOLE_SCRIPTS = {"lightning-effi": "lightning_effi.cli", "torchrun": "torch.distributed.run"}


@cache
def _warm_scripts() -> Path:
    """A folder with ``python`` and console scripts that run in forks of an interpreter that knows torch already."""
    folder = Path(tempfile.mkdtemp(prefix="warm-"))
    control, of_server = socket.socketpair()
    path, python = folder / "socket", folder / "python"
    command = [sys.executable, str(_HERE / "warm_server.py"), str(path), str(of_server.fileno())]
    server = subprocess.Popen(command, pass_fds=[of_server.fileno()], cwd=folder, start_new_session=True)
    of_server.close()

    def stop() -> None:
        control.close()
        server.wait(timeout=30)
        shutil.rmtree(folder)

    atexit.register(stop)
    assert control.recv(1) == b"!", "the warm interpreter did not start"
    client = [sys.executable, "-I", "-S", str(_HERE / "warm_client.py"), sys.executable, str(path), str(python)]
    _write_script(python, "#!/bin/sh\nexec " + " ".join(f"'{part}'" for part in client) + ' "$@"\n')
    for name, module in _CONSOLE_SCRIPTS.items():
        _write_script(folder / name, f"#!{python}\nimport sys\nfrom {module} import main\nsys.exit(main())\n")
    return folder


def warm_python() -> str:
    """A ``python`` that runs scripts in forks of an interpreter that has imported Lightning already."""
    return str(_warm_scripts() / "python")


def _write_script(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def run_command(
    command: list[str],
    folder: Path,
    *,
    text: str | None = None,
    timeout: float = 240,
    warm: bool = True,
    before: Sequence[Path] = (),
) -> subprocess.CompletedProcess[str]:
    """Run ``command`` in ``folder`` with this environment's scripts and the repository importable.

    Args:
        command: Program and arguments.
        folder: Working directory.
        text: Standard input; empty if left out.
        timeout: Seconds after which the command and every process it started are killed.
        before: Folders of modules that hide those of the repository.
        warm: Whether Python may have imported Lightning already, which looks at the interpreter when it is imported.

    Raises:
        AssertionError: The time ran out; the message holds what was printed.
    """
    scripts = [_warm_scripts(), SCRIPTS] if warm else [SCRIPTS]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, [*before, ROOT])),
        "PATH": os.pathsep.join([*map(str, scripts), os.environ["PATH"]]),
        **ENVIRONMENT,
    }
    environment.pop("PL_GLOBAL_SEED", None)  # left behind by other tests' runs in this process
    program, *arguments = command
    found = scripts[0] / ("python" if program == sys.executable else Path(program).name)
    process = subprocess.Popen(
        [str(found) if found.exists() else program, *arguments],
        cwd=folder,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # a group of its own, so that the processes Lightning starts end with it
    )
    try:
        stdout, stderr = process.communicate(text or "", timeout=timeout)
    except BaseException as error:
        os.killpg(process.pid, signal.SIGKILL)
        stdout, stderr = process.communicate()
        if isinstance(error, subprocess.TimeoutExpired):
            raise AssertionError(
                f"{command} ran longer than {timeout} s\n{stdout[-2000:]}\n{stderr[-6000:]}"
            ) from error
        raise
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)
