"""What is computed, reduced, stored and updated in which dtype."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_effi import EffiPrecision
from tests.harness import BatchList, make_trainer, run_distributed
from tests.models.gpt import GPT, batches

HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32
# name → (arguments of the plugin, dtype of: a layer's output, parameters, gradients, the optimizer's moments)
CASES: dict[str, tuple[dict[str, Any], torch.dtype, torch.dtype, torch.dtype, torch.dtype]] = {
    "16-mixed": ({"precision": "16-mixed"}, HALF, SINGLE, SINGLE, SINGLE),
    "bf16-mixed": ({"precision": "bf16-mixed"}, BRAIN, SINGLE, SINGLE, SINGLE),
    "16-true": ({"precision": "16-true"}, HALF, HALF, HALF, HALF),
    "bf16-true": ({"precision": "bf16-true"}, BRAIN, BRAIN, BRAIN, BRAIN),
    "16-true, master": ({"precision": "16-true", "master_weights": True}, HALF, SINGLE, SINGLE, SINGLE),
    "bf16-true, master": ({"precision": "bf16-true", "master_weights": True}, BRAIN, SINGLE, SINGLE, SINGLE),
}
KEPT = "blocks.0.mlp.2"
BOUND = 0.5


class Probe(pl.Callback):
    """Notes dtypes by place; ``layer``: what a layer inside a block returns."""

    def __init__(self) -> None:
        self.dtypes: dict[str, set[torch.dtype]] = {}
        self.largest = 0.0

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        places = {"layer": "blocks.1.mlp.0", "kept": KEPT, "norm": "blocks.1.norm1"}
        for place, name in places.items():
            hook = partial(self._note_output, place)
            pl_module.get_submodule(name).register_forward_hook(hook)
        for block in pl_module.blocks:
            block.register_forward_hook(self._note_largest)

    @override
    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        self._note("parameters", list(pl_module.parameters()))
        self._note("gradients", [p.grad for p in pl_module.parameters()])

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        states = [state["exp_avg"] for optimizer in trainer.optimizers for state in optimizer.state.values()]
        self._note("states", states)

    def _note(self, place: str, value: Any) -> None:
        found = (leaf.dtype for leaf in tree_leaves(value) if isinstance(leaf, Tensor) and leaf.is_floating_point())
        self.dtypes.setdefault(place, set()).update(found)

    def _note_output(self, place: str, _module: nn.Module, _args: Any, output: Tensor) -> None:
        self._note(place, output)

    def _note_largest(self, _module: nn.Module, _args: Any, output: Tensor) -> None:
        self.largest = max(self.largest, float(output.detach().abs().max()))


def fit(zero_stage: int, **settings: Any) -> tuple[dict[str, set[torch.dtype]], float]:
    pl.seed_everything(7, verbose=False)
    probe = Probe()
    strategy = {"zero_stage": zero_stage, "precision_plugin": EffiPrecision(**settings)}
    trainer = make_trainer(strategy, dist.get_world_size(), callbacks=[probe], max_steps=2, max_epochs=-1)
    module = GPT(blocks=2, tied=False, optimizer="adamw")
    trainer.fit(module, DataLoader(BatchList(batches(8)), batch_size=None))
    assert not any("forward" in vars(child) for child in module.modules()), "put back after training"
    return probe.dtypes, probe.largest


def fit_all(zero_stage: int) -> dict[str, Any]:
    found = {name: fit(zero_stage, **case[0]) for name, case in CASES.items()}
    for name in ("16-mixed", "16-true, master"):
        extra = {"keep_fp32": [KEPT], "clamp_activations": BOUND}
        found[f"{name}, kept"] = fit(zero_stage, **CASES[name][0], **extra)
    return found


@cache
def observations(zero_stage: int) -> list[dict[str, Any]]:
    return run_distributed(fit_all, 2, zero_stage, timeout=120.0)


STAGES = pytest.mark.parametrize("zero_stage", [3, pytest.param(0, marks=pytest.mark.full)])


@STAGES
@pytest.mark.parametrize("name", CASES)
def test_dtypes_are_those_promised(zero_stage: int, name: str) -> None:
    _, layer, parameters, gradients, states = CASES[name]
    for observed in observations(zero_stage):
        dtypes, largest = observed[name]
        assert dtypes["layer"] == dtypes["kept"] == {layer}
        assert dtypes["norm"] == ({SINGLE} if name.endswith("mixed") else {layer})
        assert (dtypes["parameters"], dtypes["gradients"]) == ({parameters}, {gradients})
        assert dtypes["states"] == {states}
        assert largest > BOUND


@STAGES
@pytest.mark.parametrize("name", ["16-mixed", "16-true, master"])
def test_exceptions_for_single_modules(zero_stage: int, name: str) -> None:
    for observed in observations(zero_stage):
        dtypes, largest = observed[f"{name}, kept"]
        assert dtypes["layer"] == {HALF}
        assert dtypes["kept"] == ({SINGLE} if name == "16-mixed" else {HALF})
        assert largest == BOUND
