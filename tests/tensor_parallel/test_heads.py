"""Heads that the ranks do or do not divide: right numbers either way, and the plan says what stays whole."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import pytest
import torch.nn.functional as F
from torch import Tensor, nn

from tests.harness import Training, train_and_assert_parity
from tests.models.gpt import GPT, batches


class GroupedAttention(nn.Module):
    """Fewer key and value heads than queries. ``counted``: the shape names the number of heads, and not their width."""

    def __init__(self, width: int, heads: int, kv_heads: int, counted: bool) -> None:
        super().__init__()
        self.n_head, self.n_kv, self.hd, self.counted = heads, kv_heads, width // heads, counted
        self.q, self.o = nn.Linear(width, width), nn.Linear(width, width)
        self.k, self.v = nn.Linear(width, kv_heads * self.hd), nn.Linear(width, kv_heads * self.hd)

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        if self.counted:
            q, k, v = self.q(x).view(b, s, self.n_head, -1), self.k(x), self.v(x)
            k, v = k.view(b, s, self.n_kv, -1), v.view(b, s, self.n_kv, -1)
        else:
            q, k, v = (layer(x).view(b, s, -1, self.hd) for layer in (self.q, self.k, self.v))
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        k, v = (t.repeat_interleave(self.n_head // self.n_kv, dim=1) for t in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).contiguous().view(b, s, -1))


class Grouped(GPT):
    def __init__(self, heads: int, kv_heads: int, counted: bool, **settings: Any) -> None:
        super().__init__(tied=False, width=4 * heads, heads=heads, blocks=2, **settings)
        for block in self.blocks:
            block.attention = GroupedAttention(4 * heads, heads, kv_heads, counted)


class ShownPlan(pl.Callback):
    observation = ""

    def on_train_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.observation = str(getattr(trainer.strategy, "plan", ""))


@dataclass(frozen=True)
class Heads:
    """A factory that can be pickled: ``queries`` heads on ``keys`` ones, over ``size`` ranks."""

    queries: int
    keys: int
    size: int
    counted: bool

    def __call__(self, **settings: Any) -> Grouped:
        return Grouped(self.queries, self.keys, self.counted, **settings)


SAID = {
    (8, 2, 4): "attention.k: 2 heads are not divisible by tensor_parallel_size=4 (2 would do)",
    (4, 1, 2): "attention.k: 1 head is not divisible by tensor_parallel_size=2",
    (6, 6, 4): "attention.q: 6 heads are not divisible by tensor_parallel_size=4 (2, 3, 6 would do)",
}
CASES = {
    f"{queries}-on-{keys}-{'counted' if counted else 'inferred'}-tp{size}": Heads(queries, keys, size, counted)
    for queries, keys, size in SAID
    for counted in (True, False)
}


ALWAYS = ("4-on-1-inferred-tp2", "6-on-6-counted-tp4")


@pytest.mark.parametrize(
    "case", [case if case in ALWAYS else pytest.param(case, marks=pytest.mark.full) for case in CASES]
)
def test_heads_that_do_not_divide_equal_single_process(case: str) -> None:
    heads = CASES[case]
    strategy = {"tensor_parallel_size": heads.size}
    training = Training(heads, batches, strategy=strategy, world_size=heads.size, callbacks=(ShownPlan,), steps=2)
    [plan] = train_and_assert_parity(training).observations[0]
    assert f"stays whole: blocks.*: {SAID[heads.queries, heads.keys, heads.size]}" in plan
    assert ("blocks.*.attention.q: column" in plan) == (heads.queries % heads.size == 0)
