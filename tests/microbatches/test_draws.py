"""Steps that draw random numbers for their rows are compared as if all rows were given the same."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_effi.modules.draws import SameForAllRows
from tests.harness import Training, run, train_and_assert_parity
from tests.models.gpt import GPT, VOCABULARY, batches

DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "rand": lambda x: torch.rand(x.shape),
    "rand_like": torch.rand_like,
    "randn": lambda x: torch.randn(*x.shape, dtype=torch.float64),
    "randn_like": torch.randn_like,
    "randint": lambda x: torch.randint(3, 7, x.shape),
    "randint-high": lambda x: torch.randint(7, size=x.shape),
    "randint_like": lambda x: torch.randint_like(x, 2, 9),
    "uniform_": lambda x: torch.empty_like(x).uniform_(2, 3),
    "normal_": lambda x: torch.empty_like(x).normal_(mean=5.0, std=0.1),
    "bernoulli": lambda x: torch.bernoulli(torch.full_like(x, 0.5)),
    "bernoulli_": lambda x: x.new_empty((len(x), 1, 4)).bernoulli_(0.5),
    "generator": lambda x: torch.rand(x.shape, generator=torch.Generator()),
}


@pytest.mark.parametrize("name", DRAWS)
def test_rows_are_given_the_same_numbers_whatever_was_drawn_before(name: str) -> None:
    with SameForAllRows():
        torch.rand(5)
        whole = DRAWS[name](torch.zeros(6, 3, 4))
        part = DRAWS[name](torch.zeros(2, 3, 4))
    assert torch.equal(whole[:2], part)
    assert all(torch.equal(whole[0], row) for row in whole)
    plain = DRAWS[name](torch.zeros(6, 3, 4))
    assert (plain.dtype, plain.shape) == (whole.dtype, whole.shape)
    assert whole.unique().numel() > 1
    low, high = {"randint": (3, 6), "randint-high": (0, 6), "randint_like": (2, 8), "uniform_": (2, 3),
                 "normal_": (4, 6)}.get(name, (-6, 6))  # fmt: skip
    assert low <= whole.min() <= whole.max() <= high


class DropPath(nn.Module):
    """As timm and transformers write it."""

    def __init__(self, block: nn.Module, fills: bool) -> None:
        super().__init__()
        self.block, self.fills = block, fills

    def forward(self, x: Tensor) -> Tensor:
        shape = (len(x), 1, 1)
        kept = x.new_empty(shape).bernoulli_(0.6) if self.fills else (0.6 + torch.rand(shape)).floor()
        return x + (self.block(x) - x) * kept / 0.6


class Drops(GPT):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.blocks = nn.ModuleList(DropPath(block, index % 2 == 0) for index, block in enumerate(self.blocks))


class Denoises(GPT):
    """Noise of a level that is drawn for each row, on the embedded tokens."""

    def loss(self, batch: Tensor) -> Tensor:
        x = self.embedding(batch[:, :-1])
        level = torch.randint(1, 5, (len(x),))[:, None, None] / 5
        x = x + level * torch.randn_like(x)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), batch[:, 1:].flatten())


class Masks(GPT):
    """Predicts the tokens that it masked in the step."""

    def loss(self, batch: Tensor) -> Tensor:
        tokens = batch[:, :-1]
        masked = torch.rand(tokens.shape) < 0.4
        logits = self(tokens.masked_fill(masked, VOCABULARY - 1))
        return F.cross_entropy(logits.flatten(0, 1), tokens.masked_fill(~masked, -100).flatten())


@pytest.mark.parametrize("model", [Drops, Denoises, Masks])
@pytest.mark.parametrize("stages", [1, 2])
def test_steps_that_draw_for_their_rows_are_cut(model: type[GPT], stages: int) -> None:
    strategy = {"pipeline_parallel_size": stages, "microbatches": 2, "verify": stages > 1}
    record = run(Training(model, partial(batches, rows=4), strategy=strategy, world_size=stages, steps=3))
    assert len(record.losses) == 3
    assert all(0 < loss < 10 for loss in record.losses)
    assert record.losses[0] != record.losses[1]


class DropsAlike(Drops):
    """Draws in training, too, what depends on nothing but its shape, so that one process draws the same."""

    def loss(self, batch: Tensor) -> Tensor:
        with SameForAllRows():
            return super().loss(batch)


class DenoisesAlike(Denoises):
    def loss(self, batch: Tensor) -> Tensor:
        with SameForAllRows():
            return super().loss(batch)


@pytest.mark.parametrize("model", [DropsAlike, DenoisesAlike])
@pytest.mark.parametrize("stages", [1, 2])
def test_gradients_equal_single_process_where_that_draws_the_same(model: type[GPT], stages: int) -> None:
    strategy = {"pipeline_parallel_size": stages, "microbatches": 2}
    train_and_assert_parity(Training(model, partial(batches, rows=4), strategy=strategy, world_size=stages))
