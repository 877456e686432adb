"""One script, started in each of the ways in which processes come to be."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cli.process import run_command
from tests.harness import full_parameters, run_isolated
from tests.lightning.classifier import ClassifierData
from tests.lightning.sides import assert_same, classifier, trainer_for

SCRIPT = """
import sys

how = sys.argv[1]
if how == "notebook":
    sys.ps1 = "In [1]: "  # what Lightning takes for a notebook or a prompt

import lightning.pytorch as pl
import torch
from lightning_effi import EffiStrategy
from tests.lightning.classifier import Classifier, ClassifierData

if __name__ == "__main__":
    pl.seed_everything(5)
    module = Classifier()
    strategy = EffiStrategy(zero_stage=3, start_method="spawn" if how == "spawn" else "auto", timeout=60)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        precision="64-true",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, datamodule=ClassifierData())
    if trainer.global_rank == 0:
        observed = {
            "launcher": type(strategy.launcher).__name__,
            "weights": dict(module.named_parameters()),
            "val_loss": float(trainer.callback_metrics["val_loss"]),
        }
        torch.save(observed, "observed.pt")
    if how in ("notebook", "spawn"):  # the process that started the others has the weights, and no optimizers
        trainer.save_checkpoint("after.ckpt")
"""
TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]


def train_alone() -> dict[str, Any]:
    module = classifier()
    trainer = trainer_for(None, max_epochs=1)
    trainer.fit(module, datamodule=ClassifierData())
    return {
        "weights": full_parameters(module),
        "val_loss": float(trainer.callback_metrics["val_loss"]),
    }


@pytest.mark.parametrize(
    ("how", "before", "launcher"),
    [
        pytest.param("popen", [], "_SubprocessScriptLauncher", id="popen"),
        pytest.param("notebook", [], "_FullWeightsLauncher", id="notebook"),
        pytest.param("spawn", [], "_FullWeightsLauncher", id="spawn"),
        pytest.param("torchrun", TORCHRUN, "_SubprocessScriptLauncher", id="torchrun", marks=pytest.mark.full),
    ],
)
def test_the_main_process_ends_with_the_trained_weights(
    tmp_path: Path, how: str, before: list[str], launcher: str
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    done = run_command([sys.executable, *before, "train.py", how], tmp_path, timeout=240, warm=how != "notebook")
    assert done.returncode == 0, done.stderr
    observed = torch.load(tmp_path / "observed.pt")
    assert observed.pop("launcher") == launcher
    assert {type(tensor).__name__ for tensor in observed["weights"].values()} == {"Parameter"}
    if (after := tmp_path / "after.ckpt").is_file():
        saved = torch.load(after, weights_only=True)["state_dict"]
        assert_same({name: saved[name] for name in observed["weights"]}, observed["weights"], "saved afterwards")
    assert after.is_file() == (how in ("notebook", "spawn"))
    assert_same(run_isolated(train_alone, fresh=True), observed, how)
