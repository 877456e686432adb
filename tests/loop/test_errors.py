"""An error on one rank ends all of them soon and is shown; a message that cannot complete is an error, not a wait."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from tests.cli.process import warm_python
from tests.harness import WorkerError
from tests.harness.fitting import ALL_STAGES, Fit, fit
from tests.threads import ENVIRONMENT

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPT = Path(__file__).with_name("crashing_run.py")


def run_until_it_crashes(fault: str, notes: Path) -> tuple[float, str]:
    """Seconds from the fault to the end of all ranks, and all that they printed.

    All ranks write to one pipe, which is at its end when the last of them has gone.
    """
    hidden = {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(REPOSITORY), **ENVIRONMENT}
    process = subprocess.Popen(
        [warm_python(), str(SCRIPT), fault, str(notes)],
        cwd=notes,
        env=os.environ | hidden,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # so that nothing outlives a failure of this test
    )
    try:
        output, _ = process.communicate(timeout=120)
        ended = time.monotonic()
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    assert process.returncode != 0, output
    assert (notes / "fault").exists(), output
    return ended - float((notes / "fault").read_text()), output


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("sample", "OSError: sample 13 cannot be read"),
        ("step", "ArithmeticError: the loss of batch 2 is wrong"),
        ("last stage", "KeyError: 'no such class'"),
    ],
    ids=["sample-on-rank1", "step-on-rank0", "loss-on-the-last-stage"],
)
def test_error_on_one_rank_ends_all_and_is_shown(fault: str, message: str, tmp_path: Path) -> None:
    seconds, output = run_until_it_crashes(fault, tmp_path)
    assert message in output
    assert seconds < 15, output


def test_block_that_one_rank_skips_ends_stage_3_within_the_timeout_and_is_named(tmp_path: Path) -> None:
    seconds, output = run_until_it_crashes("skipped block", tmp_path)
    assert "'layers.2'" in output
    assert "'layers.1'" in output
    assert seconds < 20, output


# --- logging and gathering under a condition ------------------------------------------------------------------------


class LogsUnderConditions(pl.LightningModule):
    """Logs one value with ``sync_dist`` on rank 0 only if ``unequal``; everything else is legitimate."""

    def __init__(self, unequal: bool = False) -> None:
        super().__init__()
        self.unequal = unequal
        self.layer = nn.Linear(2, 1)
        self.gathered: Tensor | None = None

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.layer(batch).pow(2).mean()
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        if self.unequal and self.global_rank == 0:
            self.log("a_only_here", loss, on_step=False, on_epoch=True, sync_dist=True)
        if self.global_rank == 0:
            flags = {"on_step": False, "on_epoch": True, "sync_dist": True}
            self.log("local", torch.tensor(3.0), rank_zero_only=True, **flags)  # rank_zero_only wins over sync_dist
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        if batch.mean() < 1:  # on rank 0 only
            self.log("below", batch.mean(), sync_dist=False)

    def on_validation_epoch_end(self) -> None:
        ranks = self.all_gather(torch.tensor([float(self.global_rank), 10.0]))
        self.gathered = ranks.clone()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class LogsUnequally(LogsUnderConditions):
    def __init__(self) -> None:
        super().__init__(unequal=True)


class Conditional(pl.Callback):
    """What this rank has under the names that were logged under a condition, and what it gathered."""

    def on_train_end(self, trainer: pl.Trainer, pl_module: LogsUnderConditions) -> None:
        metrics = {key: float(value) for key, value in trainer.callback_metrics.items() if key in ("local", "below")}
        self.observation = (metrics, pl_module.gathered)


def batches() -> list[Tensor]:
    return [torch.tensor([[0.0, 0.5], [2.0, 3.0]])] * 2


@ALL_STAGES
def test_logging_and_gathering_under_conditions_gives_each_rank_its_values(zero_stage: int) -> None:
    run = Fit(
        LogsUnderConditions,
        batches,
        {"zero_stage": zero_stage},
        validation=batches,
        callbacks=(Conditional,),
        precision="32-true",
    )
    first, second = (outcome.observations[0] for outcome in fit(run))
    assert first[0] == {"local": 3.0, "below": 0.25}
    assert second[0] == {}
    for _, gathered in (first, second):
        assert torch.equal(gathered, torch.tensor([[0.0, 10.0], [1.0, 10.0]]))


def test_names_that_only_one_rank_reduces_are_an_error_on_all_ranks() -> None:
    run = Fit(LogsUnequally, batches, {"zero_stage": 2}, precision="32-true")
    with pytest.raises(WorkerError, match=r"under different names.*rank 0 only: \S*a_only_here") as caught:
        fit(run)
    assert caught.value.exception == "RuntimeError"
