"""What automatic tensor parallelism costs per step against a plan written by hand for the same model.

Both train Llama-style blocks (separate query, key and value, a gated MLP) on two or more processes: a loop with torch's
``parallelize_module`` and Megatron's styles, and a Trainer with ``EffiStrategy(tensor_parallel_size=n)``, which is told
nothing about the model.
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
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.harness import StepClock, Variant, Worker, device_type, launch, run_interleaved
from benchmarks.overhead import CLOCKS, METHOD, ClockCallback, Times, compare, format_clock
from benchmarks.report import describe_run, format_run, format_table, write_report
from benchmarks.statistics import median_interval
from lightning_effi import EffiStrategy

VOCABULARY = 256
HEAD_WIDTH = 64


@dataclass(frozen=True)
class Settings:
    """Sizes of the model and of the batch, and how often what is measured."""

    width: int = 512
    layers: int = 4
    batch: int = 8
    sequence: int = 128
    repeats: int = 12
    warmup: int = 2
    steps: int = 4
    seed: int = 0


class LlamaBlock(nn.Module):
    """``[batch, sequence, width]`` → same. ``view(..., -1, HEAD_WIDTH)``, so that a hand-written plan serves it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, 3 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        y = self.attention_norm(x)
        q, k, v = (layer(y).view(rows, length, -1, HEAD_WIDTH).transpose(1, 2) for layer in (self.q, self.k, self.v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(attended.transpose(1, 2).reshape(rows, length, -1))
        y = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class LlamaModule(pl.LightningModule):
    """Next-token prediction on random tokens ``[batch, sequence + 1]``."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, settings.width)
        self.blocks = nn.ModuleList(LlamaBlock(settings.width) for _ in range(settings.layers))
        self.norm = nn.RMSNorm(settings.width)
        self.head = nn.Linear(settings.width, VOCABULARY, bias=False)

    def training_step(self, batch: Any, batch_idx: int = 0) -> Tensor:
        [tokens] = batch
        x = self.embedding(tokens[:, :-1])
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), tokens[:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def loader(settings: Settings, steps: int) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(VOCABULARY, (steps * settings.batch, settings.sequence + 1), generator=generator)
    return DataLoader(TensorDataset(tokens), batch_size=settings.batch)


def run_by_hand(settings: Settings, worker: Worker, clock: StepClock) -> None:
    module = LlamaModule(settings).to(worker.device)
    mesh = init_device_mesh(worker.device.type, (worker.world_size,))
    plan = dict.fromkeys(("q", "k", "v", "gate", "up"), ColwiseParallel()) | dict.fromkeys(
        ("o", "down"), RowwiseParallel()
    )
    for block in module.blocks:
        parallelize_module(block, mesh, plan)
    optimizer = module.configure_optimizers()
    for batch in loader(settings, clock.total_steps):
        loss = module.training_step([tensor.to(worker.device) for tensor in batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        clock.tick()


def run_effi(settings: Settings, worker: Worker, clock: StepClock) -> None:
    trainer = pl.Trainer(
        accelerator="gpu" if worker.device.type == "cuda" else "cpu",
        devices=worker.world_size,
        strategy=EffiStrategy(tensor_parallel_size=worker.world_size),
        plugins=[worker.cluster_environment],
        callbacks=[ClockCallback(clock)],
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(LlamaModule(settings), loader(settings, clock.total_steps))


def variants(settings: Settings) -> list[Variant]:
    by_hand = Variant("parallelize_module by hand", partial(run_by_hand, settings))
    return [by_hand, Variant("effi tensor parallel", partial(run_effi, settings), by_hand.name)]


def time_job(worker: Worker, settings: Settings) -> Times:
    """Runs in each process."""
    blocks = run_interleaved(
        worker, variants(settings), repeats=settings.repeats, warmup=settings.warmup, steps=settings.steps,
        seed=settings.seed,
    )  # fmt: skip
    return {
        clock: {name: [[getattr(step, clock) for step in block] for block in found] for name, found in blocks.items()}
        for clock in CLOCKS
    }


def main(arguments: Sequence[str]) -> int:
    """Measure, print a table and write the report."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks tensor", description=__doc__.partition("\n")[0])
    parser.add_argument("--processes", type=int, default=2, help="ranks of the tensor-parallel group")
    for name, default in asdict(Settings()).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--output", type=Path, default=Path("benchmark-results"), help="folder of the report")
    options = vars(parser.parse_args(arguments))
    output, processes = options.pop("output"), options.pop("processes")
    settings = Settings(**options)
    description = describe_run()
    times = launch(processes, time_job, settings)
    rows = [{"name": v.name, **{c: compare(v, times[c]) for c in CLOCKS}} for v in variants(settings)]
    interval = f"{median_interval(range(settings.repeats)).coverage:.1%} interval"
    header = ("variant", "ms/step", "ratio", interval, "CPU ms", "CPU ratio", interval)
    body = [(row["name"], *(cell for clock in CLOCKS for cell in format_clock(row[clock]))) for row in rows]
    title = (
        f"{processes} processes on {device_type(processes)}: width {settings.width}, {settings.layers} layers,"
        f" {settings.batch} x {settings.sequence} tokens; {settings.repeats} repeats of {settings.steps} steps"
    )
    text = "\n\n".join((format_run(description), f"{title}\n{format_table(header, body)}", textwrap.fill(METHOD, 118)))
    print(text)
    payload = {"benchmark": "tensor", **description, "method": METHOD, "settings": asdict(settings), "variants": rows}
    for path in write_report(output, "tensor", payload, text):
        print(f"written: {path}")
    return 0
