"""Errors, interrupts and signals in user code end a run the way Lightning promises, on all ranks."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor

from tests.harness import WorkerError, full_parameters, run_distributed, run_isolated
from tests.lightning.classifier import Classifier, ClassifierData
from tests.lightning.sides import assert_same, barrier, classifier, trainer_for


class Faulty(Classifier):
    """Raises in one of its hooks, in the second global step."""

    def __init__(self, place: str, error: type[BaseException]) -> None:
        super().__init__()
        self.place, self.error = place, error

    def fail_in(self, place: str) -> None:
        if place == self.place and (self.trainer.global_step >= 1 or place == "validation_step"):
            raise self.error(f"raised in {place}")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.fail_in("training_step")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.fail_in("validation_step")
        super().validation_step(batch, batch_idx)

    def on_after_backward(self) -> None:
        self.fail_in("on_after_backward")


class FailInCallback(pl.Callback):
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Faulty, *_: Any) -> None:
        pl_module.fail_in("callback")


class Witness(pl.Callback):
    def __init__(self) -> None:
        self.seen: list[str] = []

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self.seen.append(f"{type(exception).__name__} {exception} {trainer.state.status.value}")


def fail(zero_stage: int, place: str, error: type[BaseException]) -> dict[str, Any]:
    pl.seed_everything(5, verbose=False)
    module, witness = Faulty(place, error), Witness()
    callbacks = [witness, FailInCallback(), OnExceptionCheckpoint(".")]
    trainer = trainer_for({"zero_stage": zero_stage}, max_epochs=1, callbacks=callbacks, enable_checkpointing=True)
    with pytest.raises(SystemExit if error is KeyboardInterrupt else error) as caught:
        trainer.fit(module, datamodule=ClassifierData())
    barrier()
    # the callback's own state holds the exception, which pickle's protocol 2 names as Python 2 did
    with torch.serialization.safe_globals([(error, f"exceptions.{error.__name__}")]):
        saved = torch.load("on_exception.ckpt", weights_only=True)
    return {
        "caught": str(caught.value),
        "seen": witness.seen,
        "step": saved["global_step"],
        "weights": saved["state_dict"],
    }


def train_until(steps: int) -> dict[str, Tensor]:
    module = classifier()
    trainer_for(None, max_steps=steps, max_epochs=1).fit(module, datamodule=ClassifierData())
    return full_parameters(module)


@pytest.mark.parametrize(
    ("zero_stage", "place", "error", "step"),
    [
        (0, "training_step", ValueError, 1),
        (1, "on_after_backward", ValueError, 1),
        (2, "validation_step", ValueError, 4),
        (3, "callback", RuntimeError, 1),
        (3, "training_step", KeyboardInterrupt, 1),
    ],
)
def test_exception_hooks_run_and_save_the_last_state(
    zero_stage: int, place: str, error: type[BaseException], step: int
) -> None:
    message = f"raised in {place}"
    expected = run_isolated(train_until, step)
    for observed in run_distributed(fail, 2, zero_stage, place, error):
        assert observed["caught"] == ("1" if error is KeyboardInterrupt else message)
        assert observed["seen"] == [f"{error.__name__} {message} interrupted"]
        assert observed["step"] == step
        assert_same(expected, observed["weights"], "saved weights")


def fail_on_one_rank(zero_stage: int) -> None:
    class FailOnOneRank(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            if trainer.global_rank == 1:
                raise ValueError("only rank 1 met a bad sample")

    trainer = trainer_for({"zero_stage": zero_stage, "timeout": 30}, max_epochs=1, callbacks=[FailOnOneRank()])
    trainer.fit(classifier(), datamodule=ClassifierData())


@pytest.mark.parametrize("zero_stage", [0, 3])
def test_an_error_of_one_rank_is_shown_and_nobody_waits(zero_stage: int) -> None:
    started = time.monotonic()
    with pytest.raises(WorkerError, match="only rank 1 met a bad sample") as caught:
        run_distributed(fail_on_one_rank, 2, zero_stage, timeout=40)
    assert caught.value.rank == 1
    assert time.monotonic() - started < 35


class SignalAfterTwoSteps(pl.Callback):
    """A scheduler such as SLURM tells every process of the job."""

    def __init__(self, number: signal.Signals) -> None:
        self.number = number

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 2:
            os.kill(os.getpid(), self.number)


def be_terminated(zero_stage: int) -> tuple[int, list[str]]:
    witness = Witness()
    callbacks = [SignalAfterTwoSteps(signal.SIGTERM), witness]
    trainer = trainer_for({"zero_stage": zero_stage}, max_epochs=1, callbacks=callbacks)
    with pytest.raises(SIGTERMException):
        trainer.fit(classifier(), datamodule=ClassifierData())
    return trainer.global_step, witness.seen


@pytest.mark.parametrize("zero_stage", [1, 3])
def test_sigterm_ends_all_ranks_after_the_step(zero_stage: int) -> None:
    assert run_distributed(be_terminated, 2, zero_stage) == [(2, ["SIGTERMException  interrupted"])] * 2


FAKE_SCONTROL = '#!/bin/sh\necho "$@" >> requeued\n'


def be_requeued(zero_stage: int) -> dict[str, Any]:
    rank = torch.distributed.get_rank()
    job = {"JOB_ID": "15", "JOB_NAME": "train", "NTASKS": "2", "NTASKS_PER_NODE": "2", "NNODES": "1"}
    task = {"LOCALID": str(rank), "PROCID": str(rank), "NODEID": "0", "NODELIST": "localhost", "GPUS_ON_NODE": "0"}
    os.environ.update({f"SLURM_{key}": value for key, value in (job | task).items()})
    os.environ["PATH"] = f"{os.getcwd()}:{os.environ['PATH']}"
    if rank == 0:
        Path("scontrol").write_text(FAKE_SCONTROL)
        Path("scontrol").chmod(0o755)
    barrier()
    first = _slurm_trainer(zero_stage, SignalAfterTwoSteps(signal.SIGUSR1))
    module = classifier()
    first.fit(module, datamodule=ClassifierData())
    barrier()
    second = _slurm_trainer(zero_stage)
    started = _StartedAt()
    second.callbacks.append(started)
    second.fit(classifier(seed=99), datamodule=ClassifierData())
    return {
        "environment": type(first.strategy.cluster_environment).__name__,
        "requeued": Path("requeued").read_text().split(),
        "files": sorted(path.name for path in Path().glob("hpc_ckpt*")),
        "started at": started.step,
        "equal": all(
            torch.equal(tensor, other)
            for tensor, other in zip(
                full_parameters(module).values(), full_parameters(second.lightning_module).values(), strict=True
            )
        ),
    }


class _StartedAt(pl.Callback):
    step = -1

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.step = trainer.global_step


def _slurm_trainer(zero_stage: int, *callbacks: pl.Callback) -> pl.Trainer:
    from lightning_effi import EffiStrategy

    assert SLURMEnvironment.detect()
    return pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=EffiStrategy(zero_stage),  # type: ignore[arg-type]
        max_epochs=1,
        precision="64-true",
        callbacks=list(callbacks),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )


@pytest.mark.parametrize("zero_stage", [0, 2])
def test_slurm_signal_saves_requeues_and_the_next_job_goes_on(zero_stage: int) -> None:
    for observed in run_distributed(be_requeued, 2, zero_stage):
        assert observed["environment"] == "SLURMEnvironment"
        assert observed["requeued"] == ["requeue", "15"]
        assert observed["files"] == ["hpc_ckpt_1.ckpt"]
        assert observed["started at"] == 2
        assert observed["equal"], "the requeued job ends elsewhere than the one that was not interrupted"
