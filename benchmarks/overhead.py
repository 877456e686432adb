"""What EffiStrategy costs or saves per step against hand-written torch loops and stock Lightning strategies.

Compared, on the same module and data:

* one process: a hand-written loop, the stock single-device Trainer, EffiStrategy;
* several processes: a hand-written DDP loop, stock ``ddp`` and EffiStrategy stage 0; hand-written ``fully_shard``
  loops that keep (like stages 1 and 2) or free (stage 3) full parameters after the forward, stock
  ``ModelParallelStrategy`` around the same ``fully_shard`` calls, and EffiStrategy stages 1 to 3.
"""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from benchmarks.harness import (
    StepClock,
    Variant,
    Worker,
    device_type,
    launch,
    run_interleaved,
    run_peak_memory,
)
from benchmarks.model import BenchmarkModule, Size, Transformer, plain_loader, random_tokens
from benchmarks.report import describe_run, format_run, format_table, write_report
from benchmarks.statistics import block_medians, median_interval, paired_ratios
from lightning_effi import EffiStrategy

# Chosen so that a step takes at least 200 ms (CPU: one thread a process; CUDA: fp32 on a data-centre GPU).
DEFAULT_SIZES = {
    "cpu": Size(width=256, layers=6, batch=12, sequence=128),
    "cuda": Size(width=1536, layers=16, batch=16, sequence=512),
}
QUICK_SIZE = Size(width=32, layers=2, batch=2, sequence=16)


CLOCKS = ("wall", "cpu")


@dataclass(frozen=True)
class Settings:
    """What to measure; picklable, so that every process can build the same variants."""

    size: Size
    repeats: int
    warmup: int
    steps: int
    seed: int


# ---- Variants ------------------------------------------------------------------------------------------------------


def variants_for(world_size: int, size: Size) -> list[Variant]:
    """The variants that make sense on that many processes."""
    if world_size == 1:
        return [
            Variant("hand loop", partial(run_hand_loop, size, wrap_nothing)),
            Variant("stock single-device", partial(run_trainer, size, lambda: "auto"), "hand loop"),
            Variant("effi", partial(run_trainer, size, EffiStrategy), "hand loop"),
        ]
    keep, free = partial(shard_by_hand, reshard_after_forward=False), partial(shard_by_hand, reshard_after_forward=True)
    return [
        Variant("hand DDP loop", partial(run_hand_loop, size, wrap_ddp)),
        Variant("stock ddp", partial(run_trainer, size, lambda: "ddp"), "hand DDP loop"),
        Variant("effi stage 0", partial(run_trainer, size, partial(EffiStrategy, zero_stage=0)), "stock ddp"),
        Variant("hand fully_shard, kept", partial(run_hand_loop, size, keep)),
        Variant("stock ModelParallel, kept", partial(run_model_parallel, size, False), "hand fully_shard, kept"),
        *(
            Variant(
                f"effi stage {stage}",
                partial(run_trainer, size, partial(EffiStrategy, zero_stage=stage)),
                "hand fully_shard, kept",
            )
            for stage in (1, 2)
        ),
        Variant("hand fully_shard, freed", partial(run_hand_loop, size, free)),
        Variant("stock ModelParallel, freed", partial(run_model_parallel, size, True), "hand fully_shard, freed"),
        Variant(
            "effi stage 3", partial(run_trainer, size, partial(EffiStrategy, zero_stage=3)), "hand fully_shard, freed"
        ),
    ]


Wrap = Callable[[Transformer, Worker], Callable[[Tensor], Tensor]]


def wrap_nothing(model: Transformer, worker: Worker) -> nn.Module:
    return model


def wrap_ddp(model: Transformer, worker: Worker) -> nn.Module:
    return DistributedDataParallel(model, device_ids=[worker.rank] if worker.device.type == "cuda" else None)


def shard_by_hand(model: Transformer, worker: Worker, *, reshard_after_forward: bool) -> nn.Module:
    mesh = init_device_mesh(worker.device.type, (worker.world_size,))
    return fully_shard_blocks(model, mesh, reshard_after_forward)


def fully_shard_blocks(model: Transformer, mesh: DeviceMesh, reshard_after_forward: bool) -> nn.Module:
    """FSDP2 as its tutorial writes it: one group a block, the rest in the root."""
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard_after_forward)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard_after_forward)
    return model


def run_hand_loop(size: Size, wrap: Wrap, worker: Worker, clock: StepClock) -> None:
    """What one would write without a Trainer; ``wrap`` makes the model parallel."""
    module = BenchmarkModule(size).to(worker.device)
    forward = wrap(module.model, worker)
    optimizer = module.configure_optimizers()
    dataset = random_tokens(size, clock.total_steps, worker.world_size)
    sampler: DistributedSampler[Any] | None = (
        DistributedSampler(dataset, shuffle=False) if worker.world_size > 1 else None
    )
    for batch in DataLoader(dataset, batch_size=size.batch, sampler=sampler):
        inputs, targets = (tensor.to(worker.device) for tensor in batch)
        loss = module.loss(forward(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        clock.tick()


class ClockCallback(pl.Callback):
    """Lightning calls this right after the optimizer's update, where the hand-written loop ticks."""

    def __init__(self, clock: StepClock) -> None:
        self._clock = clock

    def on_train_batch_end(self, *arguments: Any) -> None:
        self._clock.tick()


def run_trainer(
    size: Size,
    strategy: Callable[[], Strategy | str],
    worker: Worker,
    clock: StepClock,
    module: type[BenchmarkModule] = BenchmarkModule,
) -> None:
    trainer = pl.Trainer(
        accelerator="gpu" if worker.device.type == "cuda" else "cpu",
        devices=worker.world_size,
        strategy=strategy(),
        plugins=[worker.cluster_environment],
        callbacks=[ClockCallback(clock)],
        max_epochs=1,
        # Everything that writes to the screen or the disk: real, but not a matter of the strategy.
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module(size), plain_loader(size, clock.total_steps, worker.world_size))


class KeptModule(BenchmarkModule):
    """What ``ModelParallelStrategy`` asks of its user; full parameters stay after the forward."""

    reshard_after_forward = False

    def configure_model(self) -> None:
        assert self.device_mesh is not None  # set by the strategy before this hook
        fully_shard_blocks(self.model, self.device_mesh["data_parallel"], self.reshard_after_forward)


class FreedModule(KeptModule):
    """The same, freeing full parameters after each block's forward."""

    reshard_after_forward = True


def run_model_parallel(size: Size, reshard_after_forward: bool, worker: Worker, clock: StepClock) -> None:
    def strategy() -> Strategy:
        return ModelParallelStrategy(data_parallel_size=worker.world_size, tensor_parallel_size=1)

    run_trainer(size, strategy, worker, clock, FreedModule if reshard_after_forward else KeptModule)


# ---- Jobs of the worker processes ----------------------------------------------------------------------------------


Times = dict[str, dict[str, list[list[float]]]]
"""``[clock][variant][repeat][step]`` in seconds, where clock is ``wall`` or ``cpu``."""


def time_job(worker: Worker, settings: Settings) -> Times:
    blocks = run_interleaved(
        worker,
        variants_for(worker.world_size, settings.size),
        repeats=settings.repeats,
        warmup=settings.warmup,
        steps=settings.steps,
        seed=settings.seed,
    )
    return {
        clock: {
            name: [[getattr(step, clock) for step in block] for block in repeats] for name, repeats in blocks.items()
        }
        for clock in CLOCKS
    }


def memory_job(worker: Worker, settings: Settings, name: str) -> int:
    variant = next(variant for variant in variants_for(worker.world_size, settings.size) if variant.name == name)
    return run_peak_memory(worker, variant, warmup=settings.warmup, steps=settings.steps)


# ---- Measuring and reporting ---------------------------------------------------------------------------------------


def measure(processes: int, settings: Settings, *, memory: bool) -> dict[str, Any]:
    """All variants on that many processes: one JSON object of the report's ``runs``."""
    times = launch(processes, time_job, settings)
    rows = [
        {
            "name": variant.name,
            "baseline": variant.baseline,
            **{clock: compare(variant, times[clock]) for clock in CLOCKS},
            "peak_memory_bytes": launch(processes, memory_job, settings, variant.name) if memory else None,
        }
        for variant in variants_for(processes, settings.size)
    ]
    return {
        "processes": processes,
        "device": device_type(processes),
        "settings": asdict(settings),
        "variants": rows,
    }


def compare(variant: Variant, times: dict[str, list[list[float]]]) -> dict[str, Any]:
    """One clock's figures of one variant; ``ratios`` and ``ratio`` are None without a baseline."""
    blocks = times[variant.name]
    ratios = None if variant.baseline is None else paired_ratios(blocks, times[variant.baseline])
    return {
        "step_seconds": blocks,
        "median_step_seconds": median(block_medians(blocks)),
        "ratios": ratios,
        "ratio": None if ratios is None else asdict(median_interval(ratios)),
    }


METHOD = (
    "Each repeat runs one block of every variant in a random order (the same on all ranks); a block is a fresh module "
    "and optimizer, warm-up steps, then timed steps from the end of one update to the end of the next, slowest rank. "
    "Step time: median over repeats of the block's median. CPU: processor time of a process, mean over ranks; waiting "
    "costs none, so it shows a variant's own work on a busy machine. Ratio: block median over the baseline's of the "
    "same repeat, then the median over repeats with its order-statistics interval. Peak memory: fresh processes, one "
    "variant each, largest rank, less what the process held before."
)


def format_clock(figures: dict[str, Any]) -> tuple[str, str, str]:
    """Milliseconds, ratio and interval."""
    milliseconds, ratio = f"{figures['median_step_seconds'] * 1e3:.1f}", figures["ratio"]
    if ratio is None:
        return milliseconds, "", ""
    return milliseconds, f"{ratio['median']:.3f}", f"{ratio['low']:.3f} - {ratio['high']:.3f}"


def format_overhead(run: dict[str, Any]) -> str:
    """The table of one world size."""
    size = Size(**run["settings"]["size"])
    coverage = median_interval(range(run["settings"]["repeats"])).coverage
    interval = f"{coverage:.1%} interval"
    header = ("variant", "ms/step", "ratio", interval, "CPU ms", "CPU ratio", interval, "peak MiB", "against")
    body = []
    for row in run["variants"]:
        peak = row["peak_memory_bytes"]
        figures = (cell for clock in CLOCKS for cell in format_clock(row[clock]))
        body.append((row["name"], *figures, "" if peak is None else f"{peak / 2**20:.0f}", row["baseline"] or ""))
    title = (
        f"{run['processes']} process(es) on {run['device']}: width {size.width}, {size.layers} layers, "
        f"{size.batch} x {size.sequence} tokens a process; {run['settings']['repeats']} repeats of "
        f"{run['settings']['steps']} steps"
    )
    return f"{title}\n{format_table(header, body)}"


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks overhead", description=__doc__.partition("\n")[0])
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2], help="world sizes (default: 1 2)")
    parser.add_argument("--repeats", type=int, default=12, help="paired repeats; 6 or more for a 95%% interval")
    parser.add_argument("--steps", type=int, default=4, help="timed steps of a block")
    parser.add_argument("--warmup", type=int, default=2, help="untimed steps before them")
    parser.add_argument("--width", type=int, help="residual stream (default: by device)")
    parser.add_argument("--layers", type=int, help="transformer blocks (default: by device)")
    parser.add_argument("--batch", type=int, help="sequences a process and step (default: by device)")
    parser.add_argument("--sequence", type=int, help="tokens a sequence (default: by device)")
    parser.add_argument("--seed", type=int, default=0, help="of the order of variants")
    parser.add_argument("--no-memory", action="store_true", help="leave out peak memory (a launch per variant)")
    parser.add_argument("--quick", action="store_true", help="a tiny model, three repeats, one process: a smoke test")
    parser.add_argument("--output", type=Path, default=Path("benchmark-results"), help="folder of the report")
    options = parser.parse_args(arguments)
    for name in ("repeats", "steps", "warmup"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1, not {getattr(options, name)}")
    if min(options.processes) < 1:
        parser.error(f"--processes must be at least 1, not {min(options.processes)}")
    if options.quick:
        options.processes, options.repeats, options.steps, options.warmup = [1], 3, 2, 1
    return options


def settings_for(options: argparse.Namespace, processes: int) -> Settings:
    size = QUICK_SIZE if options.quick else DEFAULT_SIZES[device_type(processes)]
    given = {name: getattr(options, name) for name in ("width", "layers", "batch", "sequence")}
    size = replace(size, **{name: value for name, value in given.items() if value is not None})
    return Settings(size, options.repeats, options.warmup, options.steps, options.seed)


def main(arguments: Sequence[str]) -> int:
    options = parse_arguments(arguments)
    description = describe_run()
    runs = [
        measure(processes, settings_for(options, processes), memory=not options.no_memory)
        for processes in options.processes
    ]
    tables = (format_overhead(run) for run in runs)
    text = "\n\n".join((format_run(description), *tables, textwrap.fill(METHOD, 118)))
    print(text)
    payload = {"benchmark": "overhead", **description, "method": METHOD, "runs": runs}
    for path in write_report(options.output, "overhead", payload, text):
        print(f"written: {path}")
    return 0
