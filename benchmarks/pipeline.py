"""What a pipeline's schedule costs beyond its ideal, and a step of it against a hand-written loop.

Two parts: every schedule with blocks that sleep (see ``known_durations``), and 1F1B on two processes against a loop
written with ``torch.distributed.pipelining`` on the same model, cut by hand at the same block.
"""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from benchmarks.harness import StepClock, Variant, Worker, device_type, launch, run_interleaved
from benchmarks.known_durations import Durations, format_durations, measure_job
from benchmarks.model import BenchmarkModule, Size, Transformer, plain_loader
from benchmarks.overhead import CLOCKS, METHOD, ClockCallback, Times, compare, format_clock
from benchmarks.report import describe_run, format_run, format_table, write_report
from benchmarks.statistics import median_interval
from lightning_effi import EffiStrategy
from lightning_effi.config import Pipeline

STAGES = 2
NOTES = (
    "First table: the ideal is the schedule's makespan with the blocks' durations alone; ratio and best: the "
    "median step's and the shortest step's to it; bubble: of the schedule, by the papers' formula, and of the measured "
    "step; live: the most micro-batches that wait for their backward in one stage, on each rank; over/action: (step - "
    "ideal) / actions of a rank; empty action: the same module without sleep, step / actions, Lightning's loop and "
    "optimizer included. Second table: "
)


@dataclass(frozen=True)
class LoopSettings:
    """Model, micro-batches and repeats of the comparison with the hand-written loop."""

    size: Size
    microbatches: int = 8
    repeats: int = 12
    warmup: int = 2
    steps: int = 4
    seed: int = 0


class HandStage(nn.Module):
    """Half of the transformer: tokens or activations in, activations or logits out."""

    def __init__(self, model: Transformer, stage: int) -> None:
        super().__init__()
        half = len(model.blocks) // STAGES
        self.blocks = model.blocks[stage * half : (stage + 1) * half]
        if stage == 0:
            self.embedding, self.position = model.embedding, model.position
        else:
            self.norm, self.head = model.norm, model.head
        self.is_first = stage == 0

    def forward(self, x: Tensor) -> Tensor:
        if self.is_first:
            x = self.embedding(x) + self.position
        for block in self.blocks:
            x = block(x)
        return x if self.is_first else self.head(self.norm(x))


def run_by_hand(settings: LoopSettings, worker: Worker, clock: StepClock) -> None:
    """What one would write with torch alone."""
    module = BenchmarkModule(settings.size).to(worker.device)
    module.model = HandStage(module.model, worker.rank)  # type: ignore[assignment]
    stage = PipelineStage(module.model, worker.rank, STAGES, worker.device)
    schedule = Schedule1F1B(stage, settings.microbatches, loss_fn=module.loss)
    optimizer = module.configure_optimizers()
    for batch in plain_loader(settings.size, clock.total_steps, 1):
        inputs, targets = (tensor.to(worker.device) for tensor in batch)
        optimizer.zero_grad()
        if worker.rank == 0:
            schedule.step(inputs)
        else:
            schedule.step(target=targets)
        optimizer.step()
        clock.tick()


def run_effi(settings: LoopSettings, worker: Worker, clock: StepClock) -> None:
    """The Trainer with the unmodified module."""
    split = [settings.size.layers // STAGES] * STAGES
    trainer = pl.Trainer(
        accelerator="gpu" if worker.device.type == "cuda" else "cpu",
        devices=worker.world_size,
        strategy=EffiStrategy(
            pipeline_parallel_size=STAGES, pipeline=Pipeline(split=split), microbatches=settings.microbatches
        ),
        plugins=[worker.cluster_environment],
        callbacks=[ClockCallback(clock)],
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(BenchmarkModule(settings.size), plain_loader(settings.size, clock.total_steps, 1))


def variants(settings: LoopSettings) -> list[Variant]:
    """The loop and what is compared with it."""
    by_hand = Variant("Schedule1F1B by hand", partial(run_by_hand, settings))
    return [by_hand, Variant("effi 1f1b", partial(run_effi, settings), by_hand.name)]


def time_job(worker: Worker, settings: LoopSettings) -> Times:
    """Runs in each process."""
    blocks = run_interleaved(
        worker, variants(settings), repeats=settings.repeats, warmup=settings.warmup, steps=settings.steps,
        seed=settings.seed,
    )  # fmt: skip
    return {
        clock: {name: [[getattr(step, clock) for step in block] for block in found] for name, found in blocks.items()}
        for clock in CLOCKS
    }


def measure_loop(settings: LoopSettings) -> dict[str, Any]:
    """The comparison with the hand-written loop: one JSON object of the report."""
    times = launch(STAGES, time_job, settings)
    rows = [{"name": v.name, **{c: compare(v, times[c]) for c in CLOCKS}} for v in variants(settings)]
    return {"settings": asdict(settings), "device": device_type(STAGES), "variants": rows}


def format_loop(run: dict[str, Any]) -> str:
    """Its table."""
    settings, size = run["settings"], Size(**run["settings"]["size"])
    interval = f"{median_interval(range(settings['repeats'])).coverage:.1%} interval"
    header = ("variant", "ms/step", "ratio", interval, "CPU ms", "CPU ratio", interval)
    body = [(row["name"], *(cell for clock in CLOCKS for cell in format_clock(row[clock]))) for row in run["variants"]]
    title = (
        f"{STAGES} processes on {run['device']}: width {size.width}, {size.layers} layers, {size.batch} x"
        f" {size.sequence} tokens in {settings['microbatches']} micro-batches; {settings['repeats']} repeats of"
        f" {settings['steps']} steps"
    )
    return f"{title}\n{format_table(header, body)}"


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks pipeline", description=__doc__.partition("\n")[0])
    parser.add_argument("--parts", nargs="+", choices=("durations", "loop"), default=["durations", "loop"])
    parser.add_argument("--ranks", type=int, default=4, help="of the pipeline of sleeping blocks")
    parser.add_argument("--pieces", type=int, nargs="+", default=[8, 16], help="its numbers of micro-batches")
    parser.add_argument("--block-ms", type=float, default=50.0, help="what a block sleeps")
    parser.add_argument("--repeats", type=int, default=12, help="paired repeats; 6 or more for a 95%% interval")
    parser.add_argument("--steps", type=int, default=4, help="timed steps of a block")
    parser.add_argument("--warmup", type=int, default=2, help="untimed steps before them")
    parser.add_argument("--microbatches", type=int, default=8, help="of the comparison with the loop")
    parser.add_argument("--width", type=int, default=256, help="residual stream")
    parser.add_argument("--layers", type=int, default=6, help="transformer blocks, an even number")
    parser.add_argument("--batch", type=int, default=24, help="sequences a step")
    parser.add_argument("--sequence", type=int, default=128, help="tokens a sequence")
    parser.add_argument("--quick", action="store_true", help="two ranks, short sleeps, a tiny model: a smoke test")
    parser.add_argument("--output", type=Path, default=Path("benchmark-results"), help="folder of the report")
    options = parser.parse_args(arguments)
    if options.layers % STAGES:
        parser.error(f"--layers must be a multiple of {STAGES}, not {options.layers}")
    return options


def settings_for(options: argparse.Namespace) -> tuple[Durations, LoopSettings]:
    """What both parts measure."""
    if options.quick:
        durations = Durations(ranks=2, microbatches=(4,), block_seconds=0.005, steps=1)
        return durations, LoopSettings(Size(32, 2, 4, 16), microbatches=2, repeats=3, warmup=1, steps=2)
    size = Size(options.width, options.layers, options.batch, options.sequence)
    durations = Durations(ranks=options.ranks, microbatches=tuple(options.pieces), block_seconds=options.block_ms / 1e3)
    return durations, LoopSettings(size, options.microbatches, options.repeats, options.warmup, options.steps)


def main(arguments: Sequence[str]) -> int:
    """Measure, print the tables and write the report."""
    options = parse_arguments(arguments)
    durations, loop = settings_for(options)
    description = describe_run()
    payload: dict[str, Any] = {"benchmark": "pipeline", **description, "method": NOTES + METHOD}
    tables = []
    if "durations" in options.parts:
        rows = launch(durations.ranks, measure_job, durations)
        payload["durations"] = {"settings": asdict(durations), "rows": rows}
        tables.append(format_durations(durations, rows))
    if "loop" in options.parts:
        payload["loop"] = measure_loop(loop)
        tables.append(format_loop(payload["loop"]))
    text = "\n\n".join((format_run(description), *tables, textwrap.fill(NOTES + METHOD, 118)))
    print(text)
    for path in write_report(options.output, "pipeline", payload, text):
        print(f"written: {path}")
    return 0
