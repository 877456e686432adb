"""Run a command the way a user would, with a hard limit on everything it starts."""

import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRIPTS = Path(sys.executable).parent


def run_command(
    command: list[str], folder: Path, *, text: str | None = None, timeout: float = 240
) -> subprocess.CompletedProcess[str]:
    """Run ``command`` in ``folder`` with this environment's scripts and the repository importable.

    Args:
        command: Program and arguments.
        folder: Working directory.
        text: Standard input; empty if left out.
        timeout: Seconds after which the command and every process it started are killed.

    Raises:
        AssertionError: The time ran out; the message holds what was printed.
    """
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "PATH": os.pathsep.join([str(SCRIPTS), os.environ["PATH"]]),
        "OMP_NUM_THREADS": "1",
    }
    environment.pop("PL_GLOBAL_SEED", None)  # left behind by other tests' runs in this process
    process = subprocess.Popen(
        command,
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
