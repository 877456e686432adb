"""``lightning-effi`` and ``python -m lightning_effi`` from the shell, with two processes."""

import sys
from pathlib import Path

import pytest
import torch
import yaml

from tests.cli.process import ROOT, SCRIPTS, run_command

pytestmark = pytest.mark.slow

CONFIG = {
    "seed_everything": 1,
    "trainer": {
        "accelerator": "cpu",
        "devices": 2,
        "max_steps": 2,
        "limit_val_batches": 1,
        "enable_progress_bar": False,
        "logger": {
            "class_path": "lightning.pytorch.loggers.CSVLogger",
            "init_args": {"save_dir": ".", "name": "log", "version": "run"},
        },
        "strategy": {"class_path": "lightning_effi.EffiStrategy", "init_args": {"zero_stage": 3}},
    },
    "model": {"class_path": "examples.gpt.GPT", "init_args": {"layers": 2, "width": 16, "heads": 2, "context": 16}},
    "data": {
        "class_path": "examples.stdlib_text.StdlibText",
        "init_args": {"context": 16, "batch_size": 2, "max_bytes": 20_000},
    },
}

COMMANDS = {
    "script": [str(SCRIPTS / "lightning-effi")],
    "module": [sys.executable, "-m", "lightning_effi"],
}


@pytest.mark.parametrize(
    ("fits", "validates"), [("script", "module"), pytest.param("module", "script", marks=pytest.mark.full)]
)
def test_fit_then_validate_with_the_saved_configuration(fits: str, validates: str, tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(yaml.safe_dump(CONFIG))
    fitted = run_command([*COMMANDS[fits], "fit", "--config", str(config)], tmp_path)
    assert fitted.returncode == 0, fitted.stderr
    assert "MEMBER: 2/2" in fitted.stderr

    saved = yaml.safe_load((tmp_path / "log/run/config.yaml").read_text())
    assert saved["trainer"]["strategy"]["class_path"] == "lightning_effi.EffiStrategy"
    assert saved["trainer"]["strategy"]["init_args"]["zero_stage"] == 3
    (checkpoint,) = tmp_path.glob("log/run/checkpoints/*.ckpt")
    assert torch.load(checkpoint, weights_only=True)["global_step"] == 2

    again = tmp_path / "again"
    again.mkdir()
    arguments = ["--config", str(tmp_path / "log/run/config.yaml"), "--ckpt_path", str(checkpoint)]
    validated = run_command([*COMMANDS[validates], "validate", *arguments], again)
    assert validated.returncode == 0, validated.stderr
    assert "val_loss" in validated.stdout


def test_wrong_value_starts_no_process_and_leaves_no_file(tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(yaml.safe_dump(CONFIG))
    arguments = ["fit", "--config", str(config), "--trainer.strategy.zero_stage=4"]
    done = run_command([*COMMANDS["script"], *arguments], tmp_path)
    assert done.returncode == 2
    assert "zero_stage: 4 is not allowed; expected 0, 1, 2, 3" in done.stderr
    assert "GLOBAL_RANK" not in done.stderr + done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["run.yaml"]


def test_demo_configuration_is_valid() -> None:
    command = [*COMMANDS["script"], "fit", "--config", "configs/demo.yaml", "--print_config"]
    done = run_command(command, ROOT)
    assert done.returncode == 0, done.stderr
    printed = yaml.safe_load(done.stdout)
    assert printed["trainer"]["strategy"]["init_args"]["zero_stage"] == 2
    assert printed["trainer"]["devices"] == 2
