"""Processes, clocks and interleaving shared by all benchmarks.

A *variant* is one way of training the same module. A *block* is one short training run of a variant: a few warm-up
steps, then the timed ones. A *repeat* runs one block of every variant, in an order that is drawn anew for each repeat
and is the same on all ranks. Figures are compared inside a repeat only, so that slow drifts of the machine (clock
frequency, neighbours) cancel.
"""

from __future__ import annotations

import gc
import itertools
import json
import logging
import multiprocessing
import random
import resource
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from lightning.fabric.plugins.environments import ClusterEnvironment

# A collective that waits this long means that a rank died or took another branch.
COLLECTIVE_TIMEOUT = timedelta(minutes=5)


@dataclass(frozen=True)
class Worker:
    """This process among the benchmark's processes."""

    rank: int
    world_size: int
    device: torch.device

    @property
    def cluster_environment(self) -> ClusterEnvironment:
        return HarnessEnvironment(self.rank, self.world_size)

    def barrier(self) -> None:
        dist.barrier(device_ids=[self.rank] if self.device.type == "cuda" else None)

    def gather(self, value: Any) -> list[Any]:
        """The picklable ``value`` of every rank, in rank order."""
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values


class HarnessEnvironment(ClusterEnvironment):
    """Tells Lightning that the processes and their process group exist already."""

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank = rank
        self._world_size = world_size

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        raise RuntimeError("the benchmark's process group meets through a file, not through an address")

    @property
    def main_port(self) -> int:
        raise RuntimeError("the benchmark's process group meets through a file, not through a port")

    @staticmethod
    def detect() -> bool:
        return False

    def world_size(self) -> int:
        return self._world_size

    def set_world_size(self, size: int) -> None:
        if size != self._world_size:
            raise ValueError(f"the Trainer asks for {size} processes, the benchmark has {self._world_size}")

    def global_rank(self) -> int:
        return self._rank

    def set_global_rank(self, rank: int) -> None:
        if rank != self._rank:
            raise ValueError(f"the Trainer assigns rank {rank}, the benchmark has {self._rank}")

    def local_rank(self) -> int:
        return self._rank

    def node_rank(self) -> int:
        return 0


def device_type(processes: int) -> str:
    """``cuda`` where every process can have a device of its own, else ``cpu``."""
    return "cuda" if torch.cuda.is_available() and torch.cuda.device_count() >= processes else "cpu"


def launch(processes: int, job: Callable[..., Any], *arguments: Any) -> Any:
    """Run ``job(worker, *arguments)`` on that many fresh processes and return rank 0's value.

    Args:
        processes: world size of the process group that is ready when ``job`` starts (also for one process).
        job: an importable top-level function that returns something JSON can hold.
        arguments: picklable arguments.

    Raises:
        torch.multiprocessing.ProcessRaisedException: with the traceback of the first rank that failed.
    """
    # The fork server imports torch and Lightning once; each process it forks is as fresh as a spawned one.
    multiprocessing.set_forkserver_preload([job.__module__])
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        mp.start_processes(_entry, (processes, folder, job, arguments), processes, start_method="forkserver")
        return json.loads((Path(folder) / "result.json").read_text())


def _entry(rank: int, world_size: int, folder: str, job: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    _quieten_lightning()
    kind = device_type(world_size)
    if kind == "cuda":
        torch.cuda.set_device(rank)
    else:
        # One thread a process: the figures then do not depend on how ranks fight for cores.
        torch.set_num_threads(1)
    worker = Worker(rank, world_size, torch.device(kind, rank) if kind == "cuda" else torch.device(kind))
    store = dist.FileStore(str(Path(folder) / "rendezvous"), world_size)
    dist.init_process_group(
        "nccl" if kind == "cuda" else "gloo",
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=COLLECTIVE_TIMEOUT,
        device_id=worker.device if kind == "cuda" else None,
    )
    result = job(worker, *arguments)
    if rank == 0:
        (Path(folder) / "result.json").write_text(json.dumps(result))
    worker.barrier()
    dist.destroy_process_group()


def _quieten_lightning() -> None:
    # One Trainer a block would otherwise print its device summary and loader advice hundreds of times.
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    for message in (
        ".*does not have many workers.*",
        ".*GPU available but not used.*",
        ".*LeafSpec.*is deprecated.*",  # Lightning 2.6 calling torch's pytree
        ".*returned a view tensor.*",  # FSDP2 on a root that ends in a Linear; nobody edits the logits in place
    ):
        warnings.filterwarnings("ignore", message=message)


@dataclass(frozen=True)
class StepTime:
    """What one step took.

    Attributes:
        wall: seconds that passed.
        cpu: seconds of processor time of this process's threads. Waiting for a peer or for a busy core costs none, so
            on a shared machine it tells a variant's own work from its neighbours'. On CUDA it is the host's work only.
    """

    wall: float
    cpu: float


class StepClock:
    """Takes a time stamp at the end of each step; a step lasts from one stamp to the next.

    Every variant calls ``tick`` at the same point, after the optimizer's update, so each step holds the same work:
    fetch the batch, forward, backward, update.

    Args:
        warmup: steps to leave out at the beginning, at least 1 (the first stamp has no predecessor).
        steps: steps to time.
        device: on CUDA each stamp waits for the device.
    """

    def __init__(self, warmup: int, steps: int, device: torch.device) -> None:
        if warmup < 1 or steps < 1:
            raise ValueError(f"warmup={warmup} and steps={steps} must be at least 1")
        self.warmup = warmup
        self.steps = steps
        self._device = device
        self._stamps: list[tuple[float, float]] = []

    @property
    def total_steps(self) -> int:
        return self.warmup + self.steps

    def tick(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._stamps.append((time.perf_counter(), time.process_time()))

    def durations(self) -> list[StepTime]:
        """The timed steps in order.

        Raises:
            RuntimeError: the variant did not run exactly ``total_steps`` steps.
        """
        if len(self._stamps) != self.total_steps:
            raise RuntimeError(f"expected {self.total_steps} steps, the variant ran {len(self._stamps)}")
        timed = itertools.pairwise(self._stamps[self.warmup - 1 :])
        return [StepTime(wall=end[0] - start[0], cpu=end[1] - start[1]) for start, end in timed]


@dataclass(frozen=True)
class Variant:
    """One way of training the module.

    Attributes:
        name: as shown in the table.
        run: trains a fresh module for ``clock.total_steps`` steps, calling ``clock.tick()`` after each.
        baseline: the variant its time is divided by, or None.
    """

    name: str
    run: Callable[[Worker, StepClock], None]
    baseline: str | None = None


def run_block(worker: Worker, variant: Variant, warmup: int, steps: int) -> list[StepTime]:
    """The timed steps of one block, the same on every rank: wall of the slowest rank, mean cpu of all."""
    clock = StepClock(warmup, steps, worker.device)
    # The garbage of the previous block's Trainer must not be collected inside this block's steps.
    gc.collect()
    worker.barrier()
    variant.run(worker, clock)
    return [
        StepTime(wall=max(step.wall for step in ranks), cpu=fmean(step.cpu for step in ranks))
        for ranks in zip(*worker.gather(clock.durations()), strict=True)
    ]


def run_interleaved(
    worker: Worker, variants: Sequence[Variant], *, repeats: int, warmup: int, steps: int, seed: int = 0
) -> dict[str, list[list[StepTime]]]:
    """Step times: ``result[variant name][repeat][step]``."""
    times: dict[str, list[list[StepTime]]] = {variant.name: [] for variant in variants}
    orders = random.Random(seed)  # the same draws on every rank
    for repeat in range(repeats):
        start = time.perf_counter()
        for variant in draw_order(variants, orders):
            times[variant.name].append(run_block(worker, variant, warmup, steps))
        if worker.rank == 0:
            taken = time.perf_counter() - start
            print(f"repeat {repeat + 1} of {repeats}: {taken:.0f} s", file=sys.stderr, flush=True)
    return times


def draw_order(variants: Sequence[Variant], orders: random.Random) -> list[Variant]:
    """A random order in which variants that are compared with each other stay next to each other.

    Families (a baseline and everything measured against it, transitively) are shuffled, and so are their members: no
    variant always runs first, and a ratio's two blocks lie seconds apart.
    """
    by_name = {variant.name: variant for variant in variants}

    def root(variant: Variant) -> str:
        while variant.baseline in by_name:
            variant = by_name[variant.baseline]
        return variant.name

    families: dict[str, list[Variant]] = {}
    for variant in variants:
        families.setdefault(root(variant), []).append(variant)
    order = list(families.values())
    orders.shuffle(order)
    for family in order:
        orders.shuffle(family)
    return [variant for family in order for variant in family]


def run_peak_memory(worker: Worker, variant: Variant, *, warmup: int, steps: int) -> int:
    """Peak bytes that one block adds to this process, the largest over ranks. Call it in a fresh process.

    On CUDA: the allocator's peak. On CPU: the peak resident set less the resident set before the block.
    """
    _touch_libraries(worker.device)
    gc.collect()
    if worker.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(worker.device)
        before = torch.cuda.memory_allocated(worker.device)
    else:
        before = peak_resident_bytes()
    worker.barrier()
    variant.run(worker, StepClock(warmup, steps, worker.device))
    after = torch.cuda.max_memory_allocated(worker.device) if worker.device.type == "cuda" else peak_resident_bytes()
    return max(worker.gather(after - before))


def _touch_libraries(device: torch.device) -> None:
    """One tiny training step, so that what torch loads lazily is not counted as a variant's memory."""
    layer = torch.nn.Linear(8, 8, device=device)
    optimizer = torch.optim.AdamW(layer.parameters())
    layer(torch.ones(8, 8, device=device)).sum().backward()
    optimizer.step()


def peak_resident_bytes() -> int:
    """Largest resident set of this process so far.

    Linux's ``ru_maxrss`` survives ``exec``, so a child started by a large parent would begin at the parent's peak;
    ``VmHWM`` belongs to the process's own address space.
    """
    status = Path("/proc/self/status")
    if status.exists():
        return int(_field(status.read_text().splitlines(), "VmHWM:").split()[0]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _field(lines: Iterable[str], name: str) -> str:
    return next(line.removeprefix(name) for line in lines if line.startswith(name))
