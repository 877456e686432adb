"""A split tensor answers and computes as the whole would: values, shapes and gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from lightning_effi.tensor_parallel.collectives import TensorGroup, assemble, contribute, exchange, scatter_sum, take
from lightning_effi.tensor_parallel.rules import on_gather
from lightning_effi.tensor_parallel.split import CannotSplitError, Split, SplitTensor, gathered, wrap
from tests.harness import run_distributed

ROWS, LENGTH, HEADS, DEPTH = 2, 3, 4, 5
WIDTH = HEADS * DEPTH


def heads(x: Tensor) -> Tensor:
    return x.view(ROWS, LENGTH, HEADS, DEPTH).transpose(1, 2)


def attention(x: Tensor, other: Tensor) -> Tensor:
    q, k, v = heads(x), heads(x.tanh()), heads(x + other)
    return (q @ k.mT / 3).softmax(-1) @ v


def written(x: Tensor, other: Tensor) -> Tensor:
    """Parts of a new tensor are filled in, one of them for all heads."""
    both = x.new_empty(*x.shape[:-1], 2 * DEPTH)
    both[..., :DEPTH].copy_(x)
    both[..., DEPTH:].copy_(other)
    return both * x.new_full(both.shape, 2.0)


# name → function of (split activations [ROWS, LENGTH, WIDTH], replicated activations of the same shape)
WITHOUT_GATHERING: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "add": lambda x, y: x + y,
    "scalar": lambda x, y: 2 - x / 3,
    "broadcast": lambda x, y: x * y[:1, :, :1],
    "bias": lambda x, y: y[0, 0] + x,
    "gelu": lambda x, y: F.gelu(x),
    "where": lambda x, y: torch.where(y > 0, x, -1.0),
    "masked_fill": lambda x, y: x.masked_fill(y[..., :1] > 0, -1.0),
    "heads": lambda x, y: heads(x),
    "heads -1": lambda x, y: x.view(ROWS, LENGTH, -1, DEPTH),
    "unflatten": lambda x, y: x.unflatten(-1, (HEADS, -1)),
    "merge": lambda x, y: heads(x).transpose(1, 2).reshape(*x.shape[:2], WIDTH),
    "flatten": lambda x, y: heads(x).permute(0, 2, 1, 3).flatten(2),
    "fold": lambda x, y: heads(x).reshape(ROWS * HEADS, LENGTH, DEPTH),
    "unfold": lambda x, y: heads(x).reshape(-1, LENGTH, DEPTH).view(ROWS, HEADS, LENGTH, DEPTH).sum(-1),
    "two dims": lambda x, y: x.reshape(-1, WIDTH).view(ROWS, LENGTH, WIDTH),
    "attention": lambda x, y: attention(x, y),
    "sdpa": lambda x, y: F.scaled_dot_product_attention(heads(x), heads(x), heads(x), is_causal=True),
    "sdpa mask": lambda x, y: F.scaled_dot_product_attention(heads(x), heads(x), heads(x), heads(y) @ heads(y).mT),
    "sdpa whole keys": lambda x, y: F.scaled_dot_product_attention(
        heads(x), heads(y)[:, :2], heads(y)[:, :2], enable_gqa=True
    ),
    "whole keys": lambda x, y: heads(x) @ heads(y).mT,
    "one key head": lambda x, y: heads(x) @ heads(y)[:, :1].mT,
    "bmm": lambda x, y: torch.bmm(heads(x).flatten(0, 1), heads(x).flatten(0, 1).mT).view(ROWS, HEADS, LENGTH, LENGTH),
    "einsum": lambda x, y: torch.einsum("bhqd,bhkd->bhqk", heads(x), heads(x)),
    "einsum whole": lambda x, y: torch.einsum("bhqd,bkd->bhqk", heads(x), y[..., :DEPTH]),
    "contraction": lambda x, y: x @ y[0].mT,
    "contraction of two": lambda x, y: x @ x.transpose(1, 2),
    "einsum contraction": lambda x, y: torch.einsum("btd,btd->bt", x, y),
    "norm of heads": lambda x, y: F.layer_norm(heads(x), (DEPTH,), y[0, 0, :DEPTH], y[0, 1, :DEPTH]),
    "rms of heads": lambda x, y: heads(x) * heads(x).pow(2).mean(-1, keepdim=True).rsqrt() * y[0, 0, :DEPTH],
    "sum": lambda x, y: x.sum(dim=1),
    "amax": lambda x, y: heads(x).amax(dim=(0, 3)),
    "unbind": lambda x, y: x.unbind(1)[1],
    "select": lambda x, y: x[:, -1],
    "slice": lambda x, y: x[:, 1:],
    "new dim": lambda x, y: x[:, None, ..., None],
    "rotate": lambda x, y: torch.cat([-heads(x)[..., 2:], heads(x)[..., :2]], dim=-1),
    "stack": lambda x, y: torch.stack([x, x * 2]),
    "cat whole": lambda x, y: torch.cat([x, y], dim=1),
    "repeat heads": lambda x, y: heads(x).repeat_interleave(2, dim=1),
    "expand heads": lambda x, y: heads(x)[:, :, None].expand(ROWS, HEADS, 3, LENGTH, DEPTH).reshape(
        ROWS, HEADS * 3, LENGTH, DEPTH
    ),
    "complex": lambda x, y: torch.view_as_real(
        torch.view_as_complex(heads(x)[..., :4].contiguous().unflatten(-1, (2, 2))) * torch.tensor(1j)
    ),
    "layer on heads": lambda x, y: F.linear(heads(x), y[0, :, :DEPTH], y[0, 0, :LENGTH]),
    "whole layer": lambda x, y: F.linear(x, y[0], y[0, 0, :LENGTH]),
    "in place": lambda x, y: (x * 1).mul_(2).add_(y),
    "zeros": lambda x, y: torch.zeros_like(x) + x.new_ones(x.shape) * x,
    "movedim": lambda x, y: heads(x).movedim(1, -1),
    "squeeze": lambda x, y: heads(x)[:, :, :1].squeeze(2),
    "mean of heads": lambda x, y: heads(x).mean(dim=1),
    "rms of all": lambda x, y: x * x.pow(2).mean(-1, keepdim=True).rsqrt() * y[0, 0],
    "sum of heads": lambda x, y: heads(x).sum(dim=(1, 3)),
    "baddbmm": lambda x, y: torch.baddbmm(
        heads(y).flatten(0, 1)[..., :1], heads(x).flatten(0, 1), heads(x).flatten(0, 1).mT, beta=0.5, alpha=2.0
    ),
    "cat of parts": lambda x, y: torch.cat([x, y], dim=-1),
    "glu of rows": lambda x, y: F.glu(x, 0),
    "normalize": lambda x, y: F.normalize(heads(x), dim=-1),
    "pad": lambda x, y: F.pad(heads(x), (1, 0, 0, 2)),
    "repeat": lambda x, y: x.repeat(2, 1, 2),
    "gather": lambda x, y: torch.gather(heads(x), -1, (heads(y) > 0).long()),
    "topk": lambda x, y: heads(x).topk(2, dim=-1).values,
    "max of two": lambda x, y: torch.max(x, y),
    "max": lambda x, y: heads(x).max(dim=-1).values,
    "written": lambda x, y: written(heads(x), heads(y)[:, :1]),
    "whole type": lambda x, y: y.double().type_as(x) * x.to(y),
}  # fmt: skip
BY_GATHERING: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "norm of all": lambda x, y: F.layer_norm(x, (WIDTH,)),
    "softmax of all": lambda x, y: x.softmax(-1),
    "sum of all": lambda x, y: x.sum(),
    "cumulative": lambda x, y: x.cumsum(-1),
    "index": lambda x, y: x[torch.arange(ROWS), 0],
    "topk": lambda x, y: x.topk(3, dim=-1).values,
    "glu": lambda x, y: F.glu(x),
}


def group() -> TensorGroup:
    return TensorGroup(dist.group.WORLD, dist.get_rank(), dist.get_world_size())


# of activations [ROWS, LENGTH, WIDTH] that are split by LENGTH, which no number of ranks here divides
BY_POSITION: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "residual": lambda x, y: x * 2 + y,
    "norm": lambda x, y: F.layer_norm(x, (WIDTH,), y[0, 0], y[0, 1]),
    "rms": lambda x, y: x * x.pow(2).mean(-1, keepdim=True).rsqrt() * y[0, 0],
    "whole layer": lambda x, y: F.linear(x, y[0], y[0, 0, :LENGTH]),
    "slices": lambda x, y: x[:, :, 2:5] + x[..., :3],
    "every position": lambda x, y: x[:, 0:LENGTH, :],
    "transpose": lambda x, y: x.transpose(0, 1).reshape(LENGTH, ROWS, HEADS, DEPTH).transpose(0, 1),
    "softmax": lambda x, y: x.softmax(-1) @ y[0].mT,
    "stack": lambda x, y: torch.stack([x, y]).unbind(0)[0],
    "width": lambda x, y: (x * y).sum(-1),
}
BY_GATHERING_POSITIONS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "some positions": lambda x, y: x[:, 1:],
    "positions repeated": lambda x, y: x.repeat_interleave(2, dim=1),
    "flattened": lambda x, y: x.reshape(-1, WIDTH),
    "cut": lambda x, y: x.split([1, 2], dim=1)[1],
    "mean": lambda x, y: x.mean(dim=1),
    "attention": lambda x, y: F.scaled_dot_product_attention(x, x, y),
}


def compare(case: Callable[[Tensor, Tensor], Any], pieces: tuple[int, ...], gathers: bool, dim: int = 2) -> None:
    torch.manual_seed(0)
    shape = [ROWS, LENGTH, WIDTH]
    shape[dim] = sum(pieces)
    x, y = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for _ in range(2))
    expected = case(x, y)
    pull = torch.randn_like(expected)
    expected_gradients = torch.autograd.grad(expected, (x, y), pull, allow_unused=True)
    calls: list[str] = []
    split = wrap(take(x, dim, pieces, group()), Split(group(), dim, pieces))
    with on_gather(lambda name, _: calls.append(name)):
        actual = case(split, y)
    assert bool(calls) == gathers, f"gathered for {calls}"
    assert actual.shape == expected.shape
    whole = gathered(actual)
    torch.testing.assert_close(whole, expected)
    gradients = torch.autograd.grad(whole, (x, y), pull, allow_unused=True)
    for gradient, wanted in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(
            torch.zeros_like(x) if gradient is None else gradient, torch.zeros_like(x) if wanted is None else wanted
        )


def compare_all(names: tuple[str, ...], gathers: bool, dim: int = 2) -> None:
    by_position = BY_GATHERING_POSITIONS if gathers else BY_POSITION
    cases = by_position if dim == 1 else BY_GATHERING if gathers else WITHOUT_GATHERING
    failed = []
    for name in names:
        try:
            compare(cases[name], (WIDTH if dim == 2 else LENGTH,), gathers, dim)
        except Exception as error:
            failed.append(f"'{name}': {type(error).__name__}: {error}")
    assert not failed, "\n".join(failed)


@pytest.mark.parametrize("world_size", [2, 4])
def test_rules_equal_the_whole(world_size: int) -> None:
    run_distributed(compare_all, world_size, tuple(WITHOUT_GATHERING), False)


def test_functions_without_a_rule_run_on_the_whole() -> None:
    run_distributed(compare_all, 2, tuple(BY_GATHERING), True)


@pytest.mark.parametrize("world_size", [2, 4])
def test_rules_equal_the_whole_by_position(world_size: int) -> None:
    run_distributed(compare_all, world_size, tuple(BY_POSITION), False, 1)
    run_distributed(compare_all, world_size, tuple(BY_GATHERING_POSITIONS), True, 1)


def split_pieces() -> None:
    for pieces in ((8, 8, 8), (8, 4, 4)):
        compare(lambda x, y, p=pieces: torch.cat([part * 2 for part in x.split(p, dim=-1)], dim=1)
                if len(set(p)) == 1 else x.split(p, dim=-1)[1], pieces, False)  # fmt: skip
        compare(lambda x, y, p=pieces: x[..., p[0] : p[0] + p[1]] + y[..., : p[1]], pieces, False)
        compare(lambda x, y: x * y, pieces, False)
    compare(lambda x, y: x.chunk(3, dim=-1)[2], (8, 8, 8), False)
    compare(lambda x, y: F.glu(x), (8, 8), False)
    # a batch of one row: heads folded into it come apart again, or together
    compare(lambda x, y: x[:1].view(LENGTH, HEADS, DEPTH).reshape(LENGTH, 1, WIDTH),
            (WIDTH,), False)  # fmt: skip
    compare(lambda x, y: x[:1].view(LENGTH, HEADS, DEPTH).view(LENGTH, 1, HEADS, DEPTH), (WIDTH,), False)
    compare(
        lambda x, y: x[0].view(LENGTH, HEADS, DEPTH).transpose(0, 1).reshape(1, HEADS, LENGTH, DEPTH), (WIDTH,), False
    )
    compare(lambda x, y: x.view(ROWS, LENGTH, 8, 2)[:, :, :4].flatten(2), (8, 4, 4), False)
    compare(lambda x, y: x.view(ROWS, LENGTH, 8, 2).flatten(2)[..., 8:12], (8, 4, 4), False)
    compare(lambda x, y: x.view(ROWS, LENGTH, 3, 4, 2).permute(2, 0, 3, 1, 4)[1], (8, 8, 8), False)
    compare(lambda x, y: x.view(ROWS * LENGTH, -1).view(ROWS, LENGTH, -1), (8, 4, 4), False)


def test_packed_pieces_are_cut_and_viewed() -> None:
    run_distributed(split_pieces, 2)


def exchange_rows() -> None:
    for pieces in ((8, 8, 8), (8, 4, 4), (4, 12)):
        whole = torch.randn(sum(pieces), 3, generator=torch.Generator().manual_seed(0))
        rank, size = dist.get_rank(), dist.get_world_size()
        stored = whole.chunk(size)[rank].clone().requires_grad_()
        used = exchange(stored, 0, pieces, group())
        torch.testing.assert_close(used, take(whole, 0, pieces, group()), rtol=0, atol=0)
        used.backward(take(whole * 2, 0, pieces, group()))
        torch.testing.assert_close(stored.grad, stored.detach() * 2, rtol=0, atol=0)


@pytest.mark.parametrize("world_size", [2, 4])
def test_stored_rows_reach_the_ranks_that_use_them(world_size: int) -> None:
    run_distributed(exchange_rows, world_size)


def take_part_in_sums() -> None:
    """From parts to wholes and back, where the ranks' parts are not of one size."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for pieces in ((5,), (3,), (1,), (8,), (5, 3)):
        whole = torch.randn(2, sum(pieces), 3, generator=torch.Generator().manual_seed(0))
        mine = take(whole, 1, pieces, group()).requires_grad_()
        together = assemble(mine, 1, pieces, group())
        torch.testing.assert_close(together, whole, rtol=0, atol=0)
        together.backward(whole * (rank + 1))
        torch.testing.assert_close(mine.grad, mine.detach() * sum(range(1, size + 1)))
        summand = whole.clone().requires_grad_()
        bias = torch.ones(3, requires_grad=True)
        part = scatter_sum(summand * (rank + 1) + contribute(bias, group()), 1, pieces, group())
        torch.testing.assert_close(part, mine.detach() * sum(range(1, size + 1)) + 1)
        part.backward(mine.detach())
        torch.testing.assert_close(summand.grad, whole * (rank + 1))
        torch.testing.assert_close(bias.grad, whole.sum(dim=(0, 1)))


@pytest.mark.parametrize("world_size", [2, 4])
def test_parts_of_any_size_are_assembled_and_summed(world_size: int) -> None:
    run_distributed(take_part_in_sums, world_size)


def refuse(case: Callable[[Tensor], Any], message: str) -> None:
    local = torch.randn(ROWS, LENGTH, WIDTH // dist.get_world_size())
    split = wrap(local, Split(group(), 2, (WIDTH,), frozenset({"layer"})))
    with pytest.raises(CannotSplitError, match=message) as caught:
        case(split)
    assert caught.value.sources == {"layer"}


def refuse_all() -> None:
    refuse(lambda x: x.view(ROWS, LENGTH, DEPTH, HEADS), "5 heads are not divisible by tensor_parallel_size=2")
    refuse(lambda x: x.view(ROWS, LENGTH, 1, WIDTH), "1 head is not divisible")
    refuse(lambda x: torch.zeros(x.shape).copy_(x), "writes into a tensor")
    refuse(lambda x: x.chunk(4, dim=-1), "not its pieces")
    refuse(lambda x: x[..., :3], "not one of its pieces")
    refuse(
        lambda x: x.transpose(1, 2).reshape(ROWS, LENGTH * WIDTH).view(ROWS, LENGTH, WIDTH), "heads are not|cuts|mixes"
    )
    refuse(lambda x: x.__setitem__(0, 1.0), "writes into")
    refuse(lambda x: x.cumsum_(0), "writes into")


def test_what_has_no_counterpart_on_parts_is_refused_with_its_layer() -> None:
    run_distributed(refuse_all, 2)


def draw() -> tuple[Any, ...]:
    torch.manual_seed(3)
    local = torch.ones(64, 64 // dist.get_world_size())
    split = wrap(local, Split(group(), 1, (64,)))
    first, second = F.dropout(split, 0.5), F.dropout(split, 0.5)
    assert isinstance(first, SplitTensor)
    common = F.dropout(torch.ones(64), 0.5)
    return first.as_subclass(Tensor), second.as_subclass(Tensor), common


def test_parts_are_dropped_independently_and_replicas_alike() -> None:
    (a, b, common_a), (c, _, common_c) = run_distributed(draw, 2)
    assert not torch.equal(a, c)
    assert not torch.equal(a, b)
    assert torch.equal(common_a, common_c)
    assert abs(float((a > 0).float().mean()) - 0.5) < 0.05
