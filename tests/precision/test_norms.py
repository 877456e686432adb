"""Norms of any order are those of the whole gradient, over every axis, with ties and replicated parameters once."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from typing_extensions import override

from tests.harness import Training, assert_parity
from tests.models import MODELS
from tests.models.gpt import GPT
from tests.precision.runs import LAYOUTS, references, run_all

ORDERS = (2.0, math.inf, 3.0)
CLIP = 0.05


class ClipsByOrder(GPT):
    """Clips by another norm than the flags can choose. Its layer norms have large gradients."""

    def __init__(self, order: float, **settings: Any) -> None:
        super().__init__(**settings)
        self.order = order
        self.norms: list[float] = []
        for block in self.blocks:
            torch.nn.init.constant_(block.norm1.weight, 0.05)
            torch.nn.init.constant_(block.norm2.weight, 0.05)

    @override
    def configure_gradient_clipping(
        self, optimizer: torch.optim.Optimizer, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        plugin = self.trainer.precision_plugin
        if hasattr(plugin, "last_grad_norm"):
            plugin.clip_grad_by_norm(optimizer, CLIP, norm_type=self.order)
            self.norms.append(float(self.trainer.strategy.last_grad_norm))
        else:
            self.norms.append(float(torch.nn.utils.clip_grad_norm_(self.parameters(), CLIP, self.order)))


class Norms(pl.Callback):
    observation: Any = None

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.observation = pl_module.norms


def training(layout: str, order: float, blocks: int) -> Training:
    world_size, strategy = LAYOUTS[layout]
    case = MODELS["gpt-tied"]
    module = partial(ClipsByOrder, order, blocks=blocks)
    return Training(module, case.batches, strategy, world_size, steps=2, callbacks=(Norms,))


@pytest.mark.parametrize(
    "layouts",
    [
        ("zero3", "tp2", "pp2"),
        pytest.param(("zero0", "pp4"), marks=pytest.mark.full),
        pytest.param(("dp2-tp2", "dp2-pp2", "tp4"), marks=pytest.mark.full),
    ],
    ids=" ".join,
)
def test_coefficient_and_norm_are_those_of_torch(layouts: tuple[str, ...]) -> None:
    runs = {f"{layout}, {order}": training(layout, order, 4) for layout in layouts for order in ORDERS}
    ours, theirs = run_all(runs), references(runs, keep_callbacks=True)
    for name, record in ours.items():
        [[expected]] = theirs[name].observations
        assert min(expected) > CLIP
        for [norms] in record.observations:
            assert norms == pytest.approx(expected, rel=1e-5), name
        assert_parity(record, theirs[name])
