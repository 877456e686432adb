"""Step time and peak memory in low precision against fp32, on whatever device is there.

The published claims, 2 to 3 times the speed and 40 to 50% less memory, are for GPUs with units for 16-bit products
(A100). Where there are none, the casts of autocast cost time and save nothing.
"""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from lightning.pytorch.strategies import Strategy

from benchmarks.harness import Variant, Worker, device_type, launch, run_interleaved, run_peak_memory
from benchmarks.model import Size
from benchmarks.overhead import (
    CLOCKS,
    DEFAULT_SIZES,
    METHOD,
    QUICK_SIZE,
    Settings,
    Times,
    compare,
    format_clock,
    run_trainer,
)
from benchmarks.report import describe_run, format_run, format_table, write_report
from benchmarks.statistics import median_interval
from lightning_effi import EffiPrecision, EffiStrategy

BASELINE = "32-true"
PRECISIONS: dict[str, dict[str, Any]] = {
    BASELINE: {},
    "bf16-mixed": {},
    # a scale that overflows in no timed step, since a skipped one costs less
    "16-mixed": {"init_scale": 1024.0},
    "bf16-true": {},
    "bf16-true, fp32 master": {"master_weights": True},
    "16-true, fp32 master": {"master_weights": True, "init_scale": 1024.0},
}


def make_strategy(name: str, zero_stage: int) -> Strategy:
    """EffiStrategy with the precision of that name."""
    precision = name.partition(",")[0]
    return EffiStrategy(zero_stage, precision_plugin=EffiPrecision(precision, **PRECISIONS[name]))  # type: ignore[arg-type]


def variants(names: Sequence[str], size: Size, zero_stage: int) -> list[Variant]:
    """One for each precision; all are compared with fp32."""
    found = []
    for name in names:
        run = partial(run_trainer, size, partial(make_strategy, name, zero_stage))
        found.append(Variant(name, run, None if name == BASELINE else BASELINE))
    return found


def time_job(worker: Worker, names: Sequence[str], settings: Settings, zero_stage: int) -> Times:
    """Runs in each process."""
    blocks = run_interleaved(
        worker, variants(names, settings.size, zero_stage), repeats=settings.repeats, warmup=settings.warmup,
        steps=settings.steps, seed=settings.seed,
    )  # fmt: skip
    return {
        clock: {name: [[getattr(step, clock) for step in block] for block in found] for name, found in blocks.items()}
        for clock in CLOCKS
    }


def memory_job(worker: Worker, settings: Settings, zero_stage: int, name: str) -> int:
    """Runs in fresh processes for each precision."""
    [variant] = variants([name], settings.size, zero_stage)
    return run_peak_memory(worker, variant, warmup=settings.warmup, steps=settings.steps)


def measure(processes: int, names: Sequence[str], settings: Settings, zero_stage: int) -> list[dict[str, Any]]:
    """The rows of the report."""
    times = launch(processes, time_job, list(names), settings, zero_stage)
    rows = [
        {
            "name": variant.name,
            **{clock: compare(variant, times[clock]) for clock in CLOCKS},
            "peak_memory_bytes": launch(processes, memory_job, settings, zero_stage, variant.name),
        }
        for variant in variants(names, settings.size, zero_stage)
    ]
    for row in rows:
        row["memory_ratio"] = row["peak_memory_bytes"] / rows[0]["peak_memory_bytes"]
    return rows


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks precision", description=__doc__.partition("\n")[0])
    parser.add_argument("--processes", type=int, default=1, help="world size")
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=list(PRECISIONS), help="beside fp32")
    parser.add_argument("--zero-stage", type=int, default=2, choices=range(4), help="what is sharded over them")
    parser.add_argument("--repeats", type=int, default=12, help="paired repeats; 6 or more for a 95%% interval")
    parser.add_argument("--steps", type=int, default=4, help="timed steps of a block")
    parser.add_argument("--warmup", type=int, default=2, help="untimed steps before them")
    for name in ("width", "layers", "batch", "sequence"):
        parser.add_argument(f"--{name}", type=int, help="size of the model or the batch (default: by device)")
    parser.add_argument("--seed", type=int, default=0, help="of the order of variants")
    parser.add_argument("--quick", action="store_true", help="a tiny model, 16-mixed, two repeats: a smoke test")
    parser.add_argument("--output", type=Path, default=Path("benchmark-results"), help="folder of the report")
    options = parser.parse_args(arguments)
    for name in ("processes", "repeats", "steps", "warmup"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1, not {getattr(options, name)}")
    if options.quick:
        options.repeats, options.steps, options.warmup, options.precisions = 2, 2, 1, ["16-mixed"]
    options.precisions = [BASELINE, *(name for name in options.precisions if name != BASELINE)]
    return options


def main(arguments: Sequence[str]) -> int:
    """Measure, print a table and write the report."""
    options = parse_arguments(arguments)
    size = QUICK_SIZE if options.quick else DEFAULT_SIZES[device_type(options.processes)]
    given = {name: getattr(options, name) for name in ("width", "layers", "batch", "sequence")}
    size = replace(size, **{name: value for name, value in given.items() if value is not None})
    settings = Settings(size, options.repeats, options.warmup, options.steps, options.seed)
    description = describe_run()
    rows = measure(options.processes, options.precisions, settings, options.zero_stage)
    text = "\n\n".join(
        (format_run(description), format_precision(rows, settings, options.processes), textwrap.fill(METHOD, 118))
    )
    print(text)
    payload = {
        "benchmark": "precision", **description, "method": METHOD, "settings": asdict(settings),
        "processes": options.processes, "device": device_type(options.processes), "variants": rows,
    }  # fmt: skip
    for path in write_report(options.output, "precision", payload, text):
        print(f"written: {path}")
    return 0


def format_precision(rows: Sequence[dict[str, Any]], settings: Settings, processes: int) -> str:
    """The table, with ratios to fp32."""
    interval = f"{median_interval(range(settings.repeats)).coverage:.1%} interval"
    header = ("precision", "ms/step", "ratio", interval, "CPU ms", "CPU ratio", interval, "peak MiB", "memory ratio")
    body = [
        (
            row["name"],
            *(cell for clock in CLOCKS for cell in format_clock(row[clock])),
            f"{row['peak_memory_bytes'] / 2**20:.0f}",
            "" if row["name"] == BASELINE else f"{row['memory_ratio']:.2f}",
        )
        for row in rows
    ]
    size = settings.size
    title = (
        f"{processes} process(es) on {device_type(processes)}: width {size.width}, {size.layers} layers, {size.batch} x"
        f" {size.sequence} tokens a process; {settings.repeats} repeats of {settings.steps} steps"
    )
    return f"{title}\n{format_table(header, body)}"
