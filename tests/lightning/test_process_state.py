"""After a run, however it ends, the process and the user's objects are as they were before it."""

from __future__ import annotations

import gc
import os
import random
import signal
from typing import Any

import lightning.pytorch as pl
import numpy
import pytest
import torch
import torchmetrics
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.harness import make_trainer, run_distributed
from tests.lightning.process_state import State, changes, groups_state, objects_state, optimizer_state, process_state

WIDTH, STEPS = 8, 6

LAYOUTS: dict[str, dict[str, Any]] = {
    "zero0": {"zero_stage": 0},
    "zero2": {"zero_stage": 2},
    "zero3": {"zero_stage": 3},
    "tp2": {"tensor_parallel_size": 2},
    "pp2": {"pipeline_parallel_size": 2, "microbatches": 2},
    "micro-batches": {"zero_stage": 2, "microbatches": 2},
    "zero1": {"zero_stage": 1},
}
ENDS = ("well", "configure_optimizers", "on_fit_start", "first step", "fifth batch", "Ctrl-C", "SIGTERM")
EXPECTED = {"well": None, "Ctrl-C": SystemExit, "SIGTERM": SIGTERMException}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Fragile(pl.LightningModule):
    """Ends as it is told: well, by an error in a hook or a step, or by Ctrl-C."""

    def __init__(self, end: str) -> None:
        super().__init__()
        self.end = end
        self.blocks = nn.ModuleList([Block() for _ in range(4)])
        self.head = nn.Linear(WIDTH, 1)
        self.error = torchmetrics.MeanAbsoluteError()
        self.made: list[torch.optim.Optimizer] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.fail_in("first step")
        output = batch
        for block in self.blocks:
            output = block(output)
        output = self.head(output)
        self.error(output.detach().flatten(), batch[:, 0])
        self.log("error", self.error, on_step=False, on_epoch=True)
        return output.pow(2).mean()

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        if batch_idx == 4:
            self.fail_in("fifth batch")
            if self.end == "Ctrl-C":
                raise KeyboardInterrupt
            if self.end == "SIGTERM":
                os.kill(os.getpid(), signal.SIGTERM)

    def on_fit_start(self) -> None:
        self.fail_in("on_fit_start")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        self.fail_in("configure_optimizers")
        self.made.append(torch.optim.AdamW(self.parameters(), lr=1e-3))
        return self.made[-1]

    def fail_in(self, place: str) -> None:
        if self.end == place:
            raise ZeroDivisionError(place)


def end_in_every_way(layouts: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What each way to end leaves behind under each layout, one run after the other in the same processes."""
    random.seed(5)  # ranks that work on the same batch draw the same numbers
    numpy.random.seed(5)
    torch.optim.AdamW([nn.Parameter(torch.ones(1))])  # the first one prepares its class
    process_state()  # imports what it looks at
    drawn = {end: (left_on_objects(None, end), torch.random.get_rng_state())[1] for end in ENDS}
    found, before = {}, process_state()
    for layout, settings in layouts.items():
        groups: State = {}
        for end in ENDS:
            left = found[f"{layout}, {end}"] = left_on_objects(settings, end)
            left["draws as without the strategy"] = torch.equal(torch.random.get_rng_state(), drawn[end])
            gc.collect()
            left["process"] = changes(before, before := process_state())
            left["groups"] = changes(groups or groups_state(), groups := groups_state())  # the first run makes them
    return found


def left_on_objects(settings: dict[str, Any] | None, end: str) -> dict[str, Any]:
    torch.manual_seed(5)
    module = Fragile(end)
    values = {name: p.detach().clone() for name, p in module.named_parameters()}
    trainer = make_trainer(settings, 2 if settings else 1, max_epochs=1, use_distributed_sampler=False)
    before = objects_state(trainer, module)
    raised: type[BaseException] | None = None
    try:
        trainer.fit(module, loader())
    except BaseException as error:
        raised = type(error)
    plain = torch.optim.AdamW(module.parameters())
    return {
        "raised": raised,
        "objects": changes(before, objects_state(trainer, module)),
        "optimizers": [changes(optimizer_state(plain), optimizer_state(made)) for made in module.made],
        "trained": any(not torch.equal(values[name], p) for name, p in module.named_parameters()),
        "output": tuple(module.head(module.blocks[0](torch.ones(3, WIDTH))).shape),
    }


def loader() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(3)
    return DataLoader([torch.randn(4, WIDTH, generator=generator) for _ in range(STEPS)], batch_size=None)


@pytest.mark.parametrize(
    "layouts",
    [("zero2", "tp2", "pp2"), pytest.param(("zero3", "zero1", "zero0", "micro-batches"), marks=pytest.mark.full)],
)
def test_process_and_objects_are_as_before_however_a_run_ends(layouts: tuple[str, ...]) -> None:
    chosen = {layout: LAYOUTS[layout] for layout in layouts}
    for rank, runs in enumerate(run_distributed(end_in_every_way, 2, chosen, timeout=120, fresh=True)):
        for name, left in runs.items():
            end, who = name.partition(", ")[2], f"rank {rank}, {name}"
            assert left["raised"] == EXPECTED.get(end, ZeroDivisionError), who
            assert left["process"] == {}, who
            assert left["groups"] == {}, who
            assert left["draws as without the strategy"], who
            assert left["objects"] == {}, who
            assert not any(left["optimizers"]), who
            assert left["trained"] == (end in ("well", "fifth batch", "Ctrl-C", "SIGTERM")), who
            assert left["output"] == (3, 1), who
