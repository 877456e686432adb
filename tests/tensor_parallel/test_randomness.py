"""Parts of tensors are dropped and filled with the numbers of one process, and later draws are those of one process."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from lightning_effi import TensorParallel
from lightning_effi.tensor_parallel.collectives import TensorGroup, take
from lightning_effi.tensor_parallel.split import Split, gathered, wrap
from tests.harness import run_distributed
from tests.harness.fitting import Fit, Outcome
from tests.harness.several_fits import assert_outcomes_equal, fit_several, single_processes
from tests.models.gpt import GPT, batches

WIDTH, HEADS = 16, 4


class Dropping(nn.Module):
    """Drops attention weights by ``attention``, hidden units, and the outputs of both layers."""

    def __init__(self, attention: str, p: float) -> None:
        super().__init__()
        self.attention, self.p = attention, p
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.heads = nn.MultiheadAttention(WIDTH, HEADS, dropout=p, batch_first=True)
        self.dropout, self.inner = nn.Dropout(p), nn.Dropout(p, inplace=True)

    def attend(self, x: Tensor) -> Tensor:
        if self.attention == "module":
            return self.heads(x, x, x, need_weights=False)[0]  # type: ignore[no-any-return]
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        if self.attention == "fused":
            found = F.scaled_dot_product_attention(q, k, v, dropout_p=self.p * self.training, is_causal=True)
        else:
            found = self.dropout((q @ k.mT).softmax(-1)) @ v
        return self.proj(found.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    @override
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attend(self.norm1(x)))
        hidden = self.inner(F.gelu(self.up(self.norm2(x))))
        hidden = hidden + 0.1 * torch.rand_like(hidden) + torch.empty_like(hidden).uniform_(0.0, 0.1)
        return x + self.dropout(self.down(hidden))


class Draws(GPT):
    """Rows are drawn in each step, behind what the blocks of the last one drew."""

    def __init__(self, p: float) -> None:
        super().__init__(tied=False, blocks=0)
        self.blocks = nn.ModuleList(Dropping(kind, p) for kind in ("fused", "eager", "module"))

    @override
    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.positions[: tokens.shape[1]]
        x = checkpoint(self.blocks[0], x, use_reentrant=False)
        return self.head(self.norm(self.blocks[2](self.blocks[1](x))))  # type: ignore[no-any-return]

    @override
    def on_fit_start(self) -> None:
        torch.manual_seed(3)

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch[torch.randperm(len(batch))[:3]], batch_idx)
        self.log("drawn", torch.rand(()), on_step=True)
        return loss


SEQUENCE = {"tensor_parallel_size": 2, "tensor": TensorParallel(sequence_parallel=True)}


def runs() -> dict[str, Fit]:
    made = {"none": partial(Draws, 0.0), "some": partial(Draws, 0.3)}
    fits = {p: Fit(module, partial(batches, 3, rows=4), {"tensor_parallel_size": 2}) for p, module in made.items()}
    return {**fits, "some, by sequence": Fit(made["some"], fits["some"].batches, SEQUENCE)}


@cache
def outcomes() -> dict[str, list[Outcome]]:
    return fit_several(runs())


@pytest.mark.parametrize("name", ["none", "some", "some, by sequence"])
def test_draws_are_those_of_one_process(name: str) -> None:
    assert_outcomes_equal(outcomes()[name], single_processes(runs())[name])


# -- single functions ------------------------------------------------------------------------------------------------

FUNCTIONS: dict[str, Any] = {
    "dropout": lambda x: F.dropout(x, 0.3),
    "of nothing": lambda x: F.dropout(x, 0.0),
    "of everything": lambda x: F.dropout(x, 1.0),
    "in evaluation": lambda x: F.dropout(x, 0.3, training=False),
    "torch.dropout": lambda x: torch.dropout(x, 0.3, True),
    "torch.dropout in evaluation": lambda x: torch.dropout(x, 0.3, train=False),
    "in place": lambda x: F.dropout(x.clone(), 0.3, inplace=True),
    "torch.dropout_": lambda x: torch.dropout_(x.clone(), 0.3, True),
    "in low precision": lambda x: F.dropout(x.bfloat16(), 0.3),
    "of a transposed tensor": lambda x: F.dropout(x.transpose(1, 2), 0.3).transpose(1, 2),
    "of a slice": lambda x: F.dropout(torch.stack([x, x], -1)[..., 0].permute(2, 0, 1), 0.3).permute(1, 2, 0),
    "modules": lambda x: nn.Dropout(0.0)(nn.Dropout(0.4)(x)),
    "dropout1d": lambda x: F.dropout1d(x, 0.3),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.3, training=True),
    "feature_alpha_dropout": lambda x: F.feature_alpha_dropout(x, 0.3, training=True),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "rrelu in evaluation": lambda x: F.rrelu(x),
    "bernoulli": lambda x: torch.bernoulli(x.detach().sigmoid()) * x,
    "bernoulli with p": lambda x: torch.bernoulli(x.detach(), 0.4) * x,
    "bernoulli_": lambda x: torch.empty_like(x).bernoulli_(0.4) * x,
    "rand_like": lambda x: x * torch.rand_like(x),
    "randn_like": lambda x: x + torch.randn_like(x, dtype=torch.float64),
    "randint_like": lambda x: x * torch.randint_like(x, 1, 5),
    "normal_": lambda x: x + torch.zeros_like(x).normal_(std=0.5),
    "gumbel_softmax": lambda x: F.gumbel_softmax(x, dim=-1),
    "multinomial": lambda x: torch.multinomial(x.detach().exp().flatten(0, 1), 1).view(2, 4) * x.sum(-1),
    "of one's shape": lambda x: x * (torch.rand(2, 4, 1) < 0.5),
}


def compare_functions() -> None:
    group = TensorGroup(dist.group.WORLD, dist.get_rank(), dist.get_world_size())
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(2, 4, 6, generator=generator)
    for (name, function), dim in ((item, dim) for item in FUNCTIONS.items() for dim in (1, 2)):
        plain, whole = values.clone().requires_grad_(), values.clone().requires_grad_()
        pieces = (values.shape[dim],)
        parts = wrap(take(whole, dim, pieces, group), Split(group, dim, pieces))
        torch.manual_seed(5)
        expected, follows = function(plain), torch.rand(())
        torch.manual_seed(5)
        actual = gathered(function(parts))
        what = f"{name}, dim {dim}"
        assert torch.equal(torch.rand(()), follows), f"{what}: the common stream is elsewhere"
        torch.testing.assert_close(actual, expected, msg=lambda text, w=what: f"{w}: {text}")
        expected.double().square().sum().backward()
        actual.double().square().sum().backward()
        torch.testing.assert_close(whole.grad, plain.grad, msg=lambda text, w=what: f"{w}, gradient: {text}")


def compare_attention() -> None:
    group = TensorGroup(dist.group.WORLD, dist.get_rank(), dist.get_world_size())
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(2, 4, 5, 6, generator=generator)
    key, value = torch.randn(2, 2, 2, 7, 6, generator=generator)
    seen = torch.rand(5, 7, generator=generator) < 0.6
    seen[2] = False  # a query that sees nothing
    bias = torch.randn(4, 5, 7, generator=generator)
    cases: dict[str, dict[str, Any]] = {
        "plain": {}, "causal": {"is_causal": True}, "mask": {"attn_mask": seen}, "bias": {"attn_mask": bias},
        "scale": {"scale": 0.7}, "no dropout": {"dropout_p": 0.0},
    }  # fmt: skip
    for name, settings in cases.items():
        settings = {"dropout_p": 0.3, "enable_gqa": True} | settings
        plain, whole = query.clone().requires_grad_(), query.clone().requires_grad_()
        parts = [wrap(take(t, 1, (t.shape[1],), group), Split(group, 1, (t.shape[1],))) for t in (whole, key, value)]
        torch.manual_seed(5)
        expected, follows = F.scaled_dot_product_attention(plain, key, value, **settings), torch.rand(())
        torch.manual_seed(5)
        actual = gathered(F.scaled_dot_product_attention(*parts, **settings))
        assert torch.equal(torch.rand(()), follows), f"{name}: the common stream is elsewhere"
        torch.testing.assert_close(actual, expected, msg=lambda text, n=name: f"{n}: {text}")
        expected.square().sum().backward()
        actual.square().sum().backward()
        torch.testing.assert_close(whole.grad, plain.grad, msg=lambda text, n=name: f"{n}, gradient: {text}")


def test_functions_draw_what_one_process_draws() -> None:
    run_distributed(compare_functions, 2)


def test_attention_drops_what_one_process_drops() -> None:
    run_distributed(compare_attention, 2)
