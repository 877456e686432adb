"""Replicated parameters count once in the gradient norm, split ones are summed up: clipping is that of one process."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from tests.harness import Training, run_reference, train_and_assert_parity
from tests.models.gpt import GPT, batches


class LoudNorms(GPT):
    """A tied GPT in which most of the gradient is that of the norms."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(tied=True, blocks=2, **settings)
        with torch.no_grad():
            for block in self.blocks:
                block.mlp[0].weight.mul_(8.0)
                block.mlp[2].weight.mul_(4.0)
                for norm in (block.norm1, block.norm2):
                    norm.weight.mul_(0.1)


class ReturnedNorm(pl.Callback):
    """``strategy.last_grad_norm`` of each step."""

    def __init__(self) -> None:
        self.observation: list[float] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        norm = getattr(trainer.strategy, "last_grad_norm", None)
        if norm is not None:
            self.observation.append(float(norm))


LAYOUTS = {
    "tp2": (2, 2, 2),
    "tp4": (4, 4, 2),
    "zero1-tp2": (4, 2, 1),
    "zero2-tp2": (4, 2, 2),
    "zero3-tp2": (4, 2, 3),
}


ALWAYS = ("tp2", "zero3-tp2")


@pytest.mark.parametrize(
    "layout", [layout if layout in ALWAYS else pytest.param(layout, marks=pytest.mark.full) for layout in LAYOUTS]
)
def test_clipping_and_returned_norm_equal_single_process(layout: str) -> None:
    world_size, tensor, zero_stage = LAYOUTS[layout]
    strategy = {"tensor_parallel_size": tensor, "zero_stage": zero_stage}
    training = Training(
        LoudNorms, batches, strategy=strategy, world_size=world_size, clip=0.5, callbacks=(ReturnedNorm,)
    )
    record, reference = train_and_assert_parity(training), run_reference(training)
    assert min(reference.gradient_norms) > 1.0  # clipping is active
    for gradients, norm in zip(reference.gradients, reference.gradient_norms, strict=True):
        loud = sum(float(g.square().sum()) for name, g in gradients.items() if "norm" in name)
        assert loud > 0.5 * norm**2
    for [returned] in record.observations:
        assert returned == pytest.approx(reference.gradient_norms, rel=1e-5)
