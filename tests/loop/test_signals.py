"""SIGTERM to any rank ends all of them after the same batch, of training and of validation."""

from __future__ import annotations

import os
import signal
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.harness import make_trainer, run_distributed


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(4))

    def training_step(self, x: Tensor, batch_idx: int) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.pow(2).mean()

    def validation_step(self, x: Tensor, batch_idx: int) -> None:
        self.training_step(x, batch_idx)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Terminate(pl.Callback):
    """Sends SIGTERM to this process after given batches of training and of validation."""

    def __init__(self, training: tuple[int, ...], validation: tuple[int, ...]) -> None:
        self.at = {"training": training, "validation": validation}
        self.batches = {"training": 0, "validation": 0}

    def count(self, kind: str) -> None:
        self.batches[kind] += 1
        if self.batches[kind] in self.at[kind]:
            os.kill(os.getpid(), signal.SIGTERM)

    def on_train_batch_end(self, *_: Any) -> None:
        self.count("training")

    def on_validation_batch_end(self, *_: Any) -> None:
        self.count("validation")


def terminated_fits(strategy: dict[str, Any], signals: list[tuple[str, dict[int, int]]]) -> list[dict[str, int]]:
    """How many batches each of several runs did; a signal is the kind of batch after which it comes, by rank."""
    done = []
    for kind, after in signals:
        rank = torch.distributed.get_rank()
        at = (after[rank],) if rank in after else ()
        callback = Terminate(at, ()) if kind == "training" else Terminate((), at)
        trainer = make_trainer(strategy, 2, callbacks=[callback], max_steps=30, val_check_interval=4)
        data = DataLoader(torch.randn(256, 8), batch_size=8)
        with pytest.raises(SIGTERMException):
            trainer.fit(Module(), data, data)
        assert "_broadcast_sigterm_tensor" not in vars(trainer.fit_loop.epoch_loop)
        done.append(callback.batches)
    return done


@pytest.mark.parametrize(
    "strategy",
    [
        {"zero_stage": 2},
        pytest.param({"zero_stage": 3}, marks=pytest.mark.full),
        pytest.param({"tensor_parallel_size": 2}, marks=pytest.mark.full),
        pytest.param({"pipeline_parallel_size": 2, "microbatches": 2}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_ranks_leave_together_on_sigterm(strategy: dict[str, Any]) -> None:
    signals = [
        ("training", {0: 2}),
        ("training", {1: 2}),
        ("training", {0: 2, 1: 3}),
        ("training", {1: 4}),  # before a validation
        ("validation", {1: 2}),
    ]
    one, other = run_distributed(terminated_fits, 2, strategy, signals)
    assert one == other
    trained = [batches["training"] for batches in one]
    validated = [batches["validation"] for batches in one]
    assert trained == [2, 2, 2, 4, 4]
    assert validated == [0, 0, 0, 1, 3]
