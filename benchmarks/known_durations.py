"""Pipeline schedules with stages of known duration: blocks that sleep, through a real Trainer on real processes.

Sleeping takes no core, so that four ranks run at once on any machine, and what a step takes beyond the schedule's ideal
is what the runtime, the messages and Lightning cost.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, ClassVar

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks.harness import StepClock, Worker
from benchmarks.overhead import ClockCallback
from benchmarks.report import format_table
from lightning_effi import EffiStrategy
from lightning_effi.config import Pipeline, Schedule
from lightning_effi.pipeline_parallel.planning.schedule import activation_bound, make_schedule
from lightning_effi.pipeline_parallel.planning.timeline import Timeline

WIDTH = 8


@dataclass(frozen=True)
class Durations:
    """What to measure.

    Attributes:
        schedules: names.
        ranks: of the pipeline.
        microbatches: numbers of them.
        block_seconds: what a forward, the gradients of inputs and those of parameters take in each block; there are two
            blocks a rank.
        warmup: steps left out at the beginning.
        steps: timed steps.
    """

    schedules: tuple[Schedule, ...] = ("gpipe", "1f1b", "interleaved", "zb1p", "zbv")
    ranks: int = 4
    microbatches: tuple[int, ...] = (8, 16)
    block_seconds: float = 0.05
    warmup: int = 1
    steps: int = 3


class Activations:
    """Counts how many forwards of blocks wait for their backward."""

    alive: ClassVar[weakref.WeakSet[Activations]] = weakref.WeakSet()
    peak: ClassVar[int] = 0

    def __init__(self) -> None:
        self.alive.add(self)
        Activations.peak = max(self.peak, len(self.alive))


class SleepOnTheWay(torch.autograd.Function):
    """Identity; its forward, and its backward to the input, take time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds, ctx.activations = seconds, Activations()
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        time.sleep(ctx.seconds)
        return gradient, None


class SleepForTheWeight(torch.autograd.Function):
    """Identity; its backward, to a parameter, takes time."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        time.sleep(ctx.seconds)
        return gradient, None


class SleepingBlock(nn.Module):
    """``[rows, width]`` → same, after a while."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        weight = SleepForTheWeight.apply(self.linear.weight, self.seconds)
        return F.linear(SleepOnTheWay.apply(x, self.seconds), weight)


class SleepingModule(pl.LightningModule):
    """Blocks of equal duration."""

    def __init__(self, blocks: int, seconds: float) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.zeros(WIDTH))
        self.blocks = nn.ModuleList(SleepingBlock(seconds) for _ in range(blocks))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = batch + self.start
        for block in self.blocks:
            x = block(x)
        return x.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def measure_job(worker: Worker, settings: Durations) -> list[dict[str, Any]]:
    """Runs in each process: a row for each schedule and number of micro-batches."""
    return [
        _measure(worker, settings, schedule, microbatches)
        for microbatches in settings.microbatches
        for schedule in settings.schedules
    ]


def _measure(worker: Worker, settings: Durations, name: Schedule, microbatches: int) -> dict[str, Any]:
    count, blocks = Pipeline(name).stages_per_rank, 2 * settings.ranks
    schedule = make_schedule(name, settings.ranks, microbatches)
    chunk = settings.block_seconds * blocks / (settings.ranks * count)
    timeline = Timeline.of(schedule, {"F": chunk, "B": 2 * chunk, "I": chunk, "W": chunk})
    seconds = _steps(worker, settings, name, microbatches, settings.block_seconds)
    measured = median(seconds)
    live = [peak * count // 2 for peak in worker.gather(Activations.peak)]  # two blocks a rank
    empty = median(_steps(worker, settings, name, microbatches, 0.0))
    actions = max(map(len, schedule.ranks))
    return {
        "schedule": name,
        "microbatches": microbatches,
        "step_seconds": seconds,
        "ideal_seconds": timeline.makespan,
        "ratio": measured / timeline.makespan,
        "best_ratio": min(seconds) / timeline.makespan,
        "bubble": timeline.bubble,
        "bubble_formula": bubble_formula(name, settings.ranks, microbatches),
        "bubble_measured": 1 - (1 - timeline.bubble) * timeline.makespan / measured,
        "live": live,
        "live_planned": schedule.live_activations(),
        "live_bound": activation_bound(name, settings.ranks, microbatches),
        "actions_per_rank": actions,
        "overhead_per_action_seconds": (measured - timeline.makespan) / actions,
        "empty_action_seconds": empty / actions,
    }


def _steps(
    worker: Worker, settings: Durations, schedule: Schedule, microbatches: int, block_seconds: float
) -> list[float]:
    clock = StepClock(settings.warmup, settings.steps, worker.device)
    trainer = pl.Trainer(
        accelerator="gpu" if worker.device.type == "cuda" else "cpu",
        devices=worker.world_size,
        strategy=EffiStrategy(pipeline_parallel_size=settings.ranks, pipeline=schedule, microbatches=microbatches),
        plugins=[worker.cluster_environment],
        callbacks=[ClockCallback(clock)],
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    rows = torch.ones(microbatches * clock.total_steps, WIDTH)
    worker.barrier()
    Activations.peak = 0
    module = SleepingModule(2 * settings.ranks, block_seconds)
    trainer.fit(module, DataLoader(rows, batch_size=microbatches))  # type: ignore[arg-type]
    return [max(ranks) for ranks in zip(*worker.gather([step.wall for step in clock.durations()]), strict=True)]


def bubble_formula(name: Schedule, ranks: int, microbatches: int) -> float:
    """What the papers give, where the micro-batches fill the pipeline."""
    count = Pipeline(name).stages_per_rank
    work = {"zb1p": 3, "zbv": 3}.get(name, 1) * count * microbatches
    return (ranks - 1) / (work + ranks - 1)


def format_durations(settings: Durations, rows: Sequence[dict[str, Any]]) -> str:
    """The table."""
    header = (
        "schedule", "pieces", "ideal ms", "step ms", "ratio", "best", "bubble", "formula", "measured", "live", "bound",
        "over/action ms", "empty action ms",
    )  # fmt: skip
    body = [
        (
            row["schedule"],
            str(row["microbatches"]),
            f"{row['ideal_seconds'] * 1e3:.0f}",
            f"{median(row['step_seconds']) * 1e3:.0f}",
            *(f"{row[key]:.3f}" for key in ("ratio", "best_ratio")),
            *(f"{row[key]:.1%}" for key in ("bubble", "bubble_formula", "bubble_measured")),
            *(" ".join(map(str, row[key])) for key in ("live", "live_bound")),
            *(f"{row[key] * 1e3:.2f}" for key in ("overhead_per_action_seconds", "empty_action_seconds")),
        )
        for row in rows
    ]
    title = (
        f"{settings.ranks} ranks, {2 * settings.ranks} blocks that sleep {settings.block_seconds * 1e3:.0f} ms in a"
        " forward and in each half of a backward"
    )
    return f"{title}\n{format_table(header, body)}"
