"""The command line inside the test's own process: importing torch for each case would take minutes."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from lightning.fabric.strategies.launchers import subprocess_script

from lightning_effi.cli import main

MODEL = ["--model", "lightning.pytorch.demos.boring_classes.BoringModel"]


@pytest.fixture
def command_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable:
    """Run ``lightning-effi ARGUMENTS`` up to its exit and return (exit status, stdout, stderr).

    Starting a process is an error: these cases end while the configuration is read.
    """

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(sys, "argv", ["lightning-effi"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PL_GLOBAL_SEED", "1")
    monkeypatch.setattr(subprocess_script.subprocess, "Popen", refuse)
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        output = capsys.readouterr()
        status = ended.value.code or 0
        assert isinstance(status, int), status
        return subprocess.CompletedProcess(arguments, status, output.out, output.err)

    return run
