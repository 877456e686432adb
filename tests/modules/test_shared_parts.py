"""Blocks that hold one module without parameters together train in every layout; those that share more are named."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from tests.harness.fitting import Fit, Outcome
from tests.harness.several_fits import assert_outcomes_equal, fit_several, single_processes
from tests.models.gpt import GPT, batches

WIDTH, HEADS = 16, 4


class Rope(nn.Module):
    """Rotary positions from a table in a buffer, and a cache that the first call fills."""

    cache: Tensor | None = None

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("angle", torch.outer(torch.arange(32.0), 1e4 ** (-torch.arange(2.0) / 2)))

    @override
    def forward(self, x: Tensor) -> Tensor:
        if self.cache is None:
            self.cache = torch.stack([self.angle.cos(), self.angle.sin()])
        (a, b), (cos, sin) = x.chunk(2, -1), self.cache[:, : x.shape[-2]].to(x.dtype)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Causal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(32, 32).tril().bool(), persistent=False)

    @override
    def forward(self, scores: Tensor) -> Tensor:
        return scores.masked_fill(~self.mask[: scores.shape[-2], : scores.shape[-1]], float("-inf"))


class Layer(nn.Module):
    """``common``: parts that all layers hold."""

    def __init__(self, common: nn.ModuleDict) -> None:
        super().__init__()
        self.rope, self.mask, self.act, self.drop = (common[name] for name in ("rope", "mask", "act", "drop"))
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    @override
    def forward(self, x: Tensor) -> Tensor:
        heads = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        q, k, v = heads
        weights = self.mask(self.rope(q) @ self.rope(k).mT).softmax(-1)
        x = x + self.proj(self.drop(weights @ v).transpose(1, 2).flatten(2))
        return x + self.down(self.act(self.up(x)))


class SharedParts(GPT):
    """``held``: in which container the blocks stand, and what they share with parameters."""

    def __init__(self, held: str = "list", shared: str = "") -> None:
        super().__init__(tied=False, blocks=0)
        self.common = nn.ModuleDict({"rope": Rope(), "mask": Causal(), "act": nn.GELU(), "drop": nn.Dropout(0.0)})
        layers = [Layer(self.common) for _ in range(4)]
        if shared == "module":
            for layer in layers:
                layer.norm = layers[0].norm
        elif shared == "parameter":
            layers[2].norm.weight = layers[1].norm.weight
        self.held = held
        if held == "dict":
            self.blocks: Any = nn.ModuleDict({f"layer {index}": layer for index, layer in enumerate(layers)})
        else:
            self.blocks = nn.Sequential(*layers) if held == "sequential" else nn.ModuleList(layers)
            self.order = tuple(layers)

    @override
    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.positions[: tokens.shape[1]]
        if self.held == "sequential":
            return self.head(self.norm(self.blocks(x)))  # type: ignore[no-any-return]
        for layer in self.blocks.values() if self.held == "dict" else self.order:
            x = layer(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


class Plan(pl.Callback):
    observation = ""

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.observation = str(getattr(trainer.strategy, "plan", ""))


LAYOUTS: dict[str, dict[str, Any]] = {
    "zero3": {"zero_stage": 3},
    "pp2": {"pipeline_parallel_size": 2, "microbatches": 2},
    "tp2": {"tensor_parallel_size": 2},
}


def runs(**settings: str) -> dict[str, Fit]:
    made = partial(SharedParts, **settings)
    return {name: Fit(made, partial(batches, 3), layout, callbacks=(Plan,)) for name, layout in LAYOUTS.items()}


@cache
def outcomes() -> dict[str, list[Outcome]]:
    return fit_several(runs())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_blocks_may_share_modules_without_parameters(layout: str) -> None:
    assert_outcomes_equal(outcomes()[layout], single_processes(runs())[layout])


@pytest.mark.parametrize(
    ("layout", "claim"), [("zero3", "4 blocks of"), ("pp2", "blocks.2 to blocks.3"), ("tp2", "blocks.*.qkv")]
)
def test_blocks_that_share_such_modules_are_in_the_plan(layout: str, claim: str) -> None:
    assert any(claim in str(observed) for observed in outcomes()[layout][0].observations)


@pytest.mark.full
@pytest.mark.parametrize("settings", [{"held": "dict"}, {"held": "sequential"}], ids=str)
def test_in_other_containers(settings: dict[str, str]) -> None:
    found, expected = fit_several(runs(**settings)), single_processes(runs(**settings))
    for layout in LAYOUTS:
        assert_outcomes_equal(found[layout], expected[layout])
