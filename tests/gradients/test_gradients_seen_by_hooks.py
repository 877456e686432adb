"""What a module's own code reads from gradients and weights is that of the whole tensor, never of one rank's shard."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities import grad_norm
from torch import nn
from typing_extensions import override

from tests.harness.fitting import ALL_STAGES, Fit, Outcome
from tests.harness.several_fits import assert_outcomes_equal, fit_several, single_processes
from tests.models.gpt import GPT, batches

STEPS = 2


def gradients(module: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad for parameter in module.parameters() if parameter.grad is not None]


# How people look at gradients in on_before_optimizer_step. Each returns a number, or a dict of them.
READERS: dict[str, Callable[[pl.LightningModule], Any]] = {
    "clip_grad_norm_": lambda m: float(nn.utils.clip_grad_norm_(m.parameters(), 1e6)),
    "clip_grad_norm_ inf": lambda m: nn.utils.clip_grad_norm_(m.parameters(), 1e6, norm_type=torch.inf).item(),
    "get_total_norm": lambda m: nn.utils.get_total_norm(gradients(m)).item(),
    "lightning grad_norm": lambda m: {name: float(norm) for name, norm in grad_norm(m, norm_type=2).items()},
    "norm of each": lambda m: math.sqrt(sum(g.norm().item() ** 2 for g in gradients(m))),
    "norm of each, detached": lambda m: [float(g.detach().data.norm(2)) for g in gradients(m)],
    "norm of norms": lambda m: torch.stack([g.norm() for g in gradients(m)]).norm().item(),
    "tensor of norms": lambda m: torch.tensor([g.norm() for g in gradients(m)]).norm().item(),
    "mean absolute": lambda m: m.blocks[0].mlp[0].weight.grad.abs().mean().item(),
    "largest": lambda m: max(float(g.abs().max()) for g in gradients(m)),
    "comparison": lambda m: bool(m.positions.grad.abs().max() > float(m.positions.grad.abs().max()) * 0.999),
    "weights": lambda m: m.positions.norm().item(),
    "formatted": lambda m: float(f"{m.head.weight.grad.norm():.7e}"),
    "tolist": lambda m: m.norm.weight.grad.norm().tolist(),
    "numpy": lambda m: float(m.norm.weight.grad.norm().cpu().numpy()),
}


class Reader(GPT):
    """Reads gradients where Lightning's documentation tells to, and logs them."""

    def __init__(self) -> None:
        super().__init__(blocks=2)

    @override
    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.log("logged_norm", self.head.weight.grad.norm(), on_step=True, prog_bar=True)
        self.log("logged_mean", self.blocks[0].mlp[0].weight.grad.abs().mean(), on_step=True, prog_bar=True)
        self.log("logged_synced", self.positions.grad.norm(), on_step=False, on_epoch=True, sync_dist=True)


class Read(pl.Callback):
    """``observation``: for each step, the value of each reader, or what it raised."""

    def __init__(self) -> None:
        self.observation: list[dict[str, Any]] = []

    @override
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        self.observation.append({name: read(pl_module) for name, read in READERS.items()})


class ReadOnRankZero(pl.Callback):
    """Reads logged values where only the first rank does so, as progress bars do.

    ``observation``: both values after each batch, on the first rank.
    """

    def __init__(self) -> None:
        self.observation: list[float] = []

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        if trainer.is_global_zero:
            shown = trainer.progress_bar_metrics
            self.observation += [float(shown["logged_norm"]), float(shown["logged_mean"])]


def runs(zero_stage: int) -> dict[str, Fit]:
    strategy = {"zero_stage": zero_stage}
    return {
        "readers": Fit(partial(GPT, blocks=2), partial(batches, STEPS), strategy, callbacks=(Read,)),
        "logging": Fit(Reader, partial(batches, STEPS), strategy, callbacks=(ReadOnRankZero,)),
    }


@cache
def outcomes(zero_stage: int) -> dict[str, list[Outcome]]:
    return fit_several(runs(zero_stage))


@ALL_STAGES
@pytest.mark.parametrize("reader", READERS)
def test_the_value_read_is_that_of_the_whole_tensor(zero_stage: int, reader: str) -> None:
    expected = _read(single_processes(runs(zero_stage))["readers"])
    for outcome in outcomes(zero_stage)["readers"]:
        for ours, theirs in zip(_read(outcome), expected, strict=True):
            assert ours[reader] == pytest.approx(theirs[reader], rel=1e-5)


@ALL_STAGES
def test_logged_norms_are_those_of_whole_gradients_for_whoever_reads_them(zero_stage: int) -> None:
    expected = single_processes(runs(zero_stage))["logging"]
    results = outcomes(zero_stage)["logging"]
    assert_outcomes_equal(results, expected)  # a message that one rank sends alone would mix with the next one of all
    assert _read(results[0]) == pytest.approx(_read(expected), rel=1e-7)


def _read(outcome: Outcome) -> list[Any]:
    return next(observation for observation in outcome.observations if observation)
