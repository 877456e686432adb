"""HealthCheck names the module that makes values infinite or NaN, on whichever rank it runs."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_effi import EffiPrecision, EffiStrategy, HealthCheck
from tests.harness import BatchList, WorkerError, make_trainer, run_distributed
from tests.models.gpt import GPT, batches
from tests.precision.runs import LAYOUTS

RANK = 1


class BadInForward(nn.Module):
    """Adds infinity in the second step, on one rank of those that run it."""

    def __init__(self, linear: nn.Linear, rank: int | None) -> None:
        super().__init__()
        self.linear = linear
        self.rank = rank
        self.step = -1

    def is_bad(self) -> bool:
        return self.step == 1 and self.rank in (None, dist.get_rank())

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return y + float("inf") if self.is_bad() else y


class BadInBackward(BadInForward):
    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return _Infinite.apply(y) if self.is_bad() else y


class _Infinite(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * float("inf")


class Bad(GPT):
    """``mlp.2`` of the last block misbehaves."""

    def __init__(self, kind: type[BadInForward], rank: int | None, blocks: int = 2) -> None:
        super().__init__(blocks=blocks)
        self.blocks[-1].mlp[2] = kind(self.blocks[-1].mlp[2], rank)

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.blocks[-1].mlp[2].step = batch_idx


class BadLoss(GPT):
    @override
    def loss(self, batch: Tensor) -> Tensor:
        loss = super().loss(batch)
        return loss / 0.0 if self.trainer.fit_loop.batch_idx == 1 else loss


def fit(strategy: dict[str, Any], module: Any, precision: str = "32-true") -> HealthCheck:
    pl.seed_everything(7, verbose=False)
    health, plugin = HealthCheck(), EffiPrecision(precision)  # type: ignore[arg-type]
    trainer = make_trainer(
        {**strategy, "precision_plugin": plugin}, dist.get_world_size(), callbacks=[health], max_epochs=1
    )
    trainer.fit(module(), DataLoader(BatchList(batches(8, rows=4)), batch_size=None))
    assert not torch.nn.modules.module._global_forward_hooks, "the hook is gone when training has ended"
    assert float(trainer.callback_metrics["grad_norm"]) == float(trainer.strategy.last_grad_norm)
    return health


@pytest.mark.parametrize(
    ("layout", "kind", "rank", "message"),
    [
        ("zero2", BadInForward, RANK, r"'blocks\.1\.mlp\.2' \(rank 1\) returned values that are not finite"),
        (
            "zero3",
            BadInBackward,
            RANK,
            r"'blocks\.1\.mlp\.2\.linear' \(rank 1\) made a gradient|'blocks\.1\.mlp\.2' \(",
        ),
        ("pp2", BadInForward, None, r"'blocks\.1\.mlp\.2' \(rank 1\) returned"),
    ],
)
def test_run_ends_with_the_modules_name(layout: str, kind: Any, rank: int | None, message: str) -> None:
    with pytest.raises(WorkerError, match=r"HealthCheck: in optimizer step 2, " + message) as caught:
        run_distributed(partial(fit, LAYOUTS[layout][1], partial(Bad, kind, rank)), 2)
    assert "keep_fp32=['blocks.1.mlp.2" in str(caught.value)


@pytest.mark.parametrize(("schedule", "rank"), [("interleaved", 1), ("zbv", 0)])
def test_all_stages_of_a_rank_are_watched(schedule: str, rank: int) -> None:
    strategy = {**LAYOUTS["pp2"][1], "pipeline": schedule}
    with pytest.raises(WorkerError, match=rf"step 2, 'blocks\.3\.mlp\.2' \(rank {rank}\) returned"):
        run_distributed(partial(fit, strategy, partial(Bad, BadInForward, None, blocks=4)), 2)


def warned(strategy: dict[str, Any]) -> tuple[list[str], list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        health = fit(strategy, partial(Bad, BadInForward, RANK), "16-mixed")
    lines = [str(w.message) for w in caught if str(w.message).startswith("HealthCheck")]
    return [each.module for each in health.findings], lines


def test_with_a_loss_scale_it_is_a_warning() -> None:
    first, second = run_distributed(warned, 2, LAYOUTS["zero2"][1])
    assert first[0] == second[0] == ["blocks.1.mlp.2"]
    assert [len(lines) for _, lines in (first, second)] == [1, 0]
    assert "The step is skipped" in first[1][0]


def test_loss_is_blamed_where_no_module_is() -> None:
    pl.seed_everything(7, verbose=False)
    flags = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "max_epochs": 1}
    trainer = pl.Trainer(accelerator="cpu", devices=1, strategy=EffiStrategy(), callbacks=[HealthCheck()], **flags)
    with pytest.raises(RuntimeError, match=r"in optimizer step 2, 'the loss'"):
        trainer.fit(BadLoss(blocks=2), DataLoader(BatchList(batches(4)), batch_size=None))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"every_n_steps": 0}, "every_n_steps must be an integer of at least 1"),
        ({"checks": ("seeds",)}, "does not carry out checks=['seeds']"),
        ({"checks": ("nan",)}, "checks must be a sequence of 'gradients'"),
        ({"checks": "nonfinite"}, "checks must be a sequence of"),
    ],
)
def test_unknown_checks_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        HealthCheck(**settings)
    assert message in str(caught.value)


def test_other_strategies_are_refused() -> None:
    trainer = pl.Trainer(accelerator="cpu", devices=1, callbacks=[HealthCheck()], logger=False, max_epochs=1)
    with pytest.raises(ValueError, match="HealthCheck works with EffiStrategy"):
        trainer.fit(GPT(blocks=2), DataLoader(BatchList(batches(1)), batch_size=None))
