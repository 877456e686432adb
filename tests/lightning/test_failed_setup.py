"""An error right before a module is split or sharded leaves the module, its optimizers and the process as before."""

from __future__ import annotations

import gc
import random
from typing import Any
from unittest import mock

import numpy
import torch
from torch import nn

from lightning_effi.data_parallel.sharded import ShardedEngine
from lightning_effi.pipeline_parallel.running.runner import PipelineRunner
from lightning_effi.tensor_parallel.run import TensorRun
from tests.harness import make_trainer, run_distributed
from tests.lightning.process_state import changes, objects_state, process_state
from tests.lightning.test_process_state import LAYOUTS, Fragile, loader

PLACES = {"zero3": (ShardedEngine, "__init__"), "tp2": (TensorRun, "apply"), "pp2": (PipelineRunner, "keep_stage")}


class OfSomebodyElse(Fragile):
    """The second optimizer has a parameter that is not the module's."""

    def configure_optimizers(self) -> Any:
        first, second = super().configure_optimizers(), torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1)
        self.automatic_optimization = False
        return [first, second]


def fail_in_every_place() -> dict[str, tuple[Any, ...]]:
    random.seed(5)  # ranks that work on the same batch draw the same numbers
    numpy.random.seed(5)
    torch.optim.AdamW([nn.Parameter(torch.ones(1))])  # the first one prepares its class
    process_state()  # imports what it looks at
    found: dict[str, tuple[Any, ...]] = {}
    for layout, (owner, method) in PLACES.items():
        module = Fragile("well")
        with mock.patch.object(owner, method, side_effect=MemoryError("planted")):
            first = fit(module, layout)
        found[layout] = (*first, fit(module, layout)[0])
    found["foreign"] = fit(OfSomebodyElse("well"), "zero3")
    hooked = Fragile("well")
    [*hooked.parameters()][-1].register_post_accumulate_grad_hook(lambda _: None)
    found["hook"] = fit(hooked, "zero3")
    return found


def fit(module: Fragile, layout: str) -> tuple[Any, ...]:
    """What ``trainer.fit`` raised, and what it has left behind."""
    values = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    trainer = make_trainer(LAYOUTS[layout], 2, max_epochs=1, use_distributed_sampler=False)
    before, around = objects_state(trainer, module), process_state()
    raised = ""
    try:
        trainer.fit(module, loader())
    except Exception as error:
        raised = f"{type(error).__name__}: {error}"
    gc.collect()
    [held] = [group["params"] for group in module.made[-1].param_groups]
    parameters = dict(module.named_parameters())
    return (
        raised,
        changes(before, objects_state(trainer, module)) | changes(around, process_state()),
        all(torch.equal(values[name], parameter) for name, parameter in parameters.items()),
        [id(parameter) for parameter in held] == [id(parameter) for parameter in parameters.values()],
    )


def test_module_optimizers_and_process_are_as_if_it_had_not_been_tried() -> None:
    for rank, found in enumerate(run_distributed(fail_in_every_place, 2, fresh=True)):
        for layout in PLACES:
            raised, *rest = found[layout]
            assert "planted" in raised, (rank, layout)
            assert rest == [{}, True, True, ""], (rank, layout)
        for name, reason in {"foreign": "is not one of OfSomebodyElse's", "hook": "grad_hook"}.items():
            raised, *rest = found[name]
            assert reason in raised, (rank, name)
            assert rest == [{}, True, True], (rank, name)
