"""Norms and clipping of whole gradients, whatever part of them a rank holds."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from lightning_effi.gradients.clipping import clip_gradient_norm, clip_gradient_value, gradient_norm
from tests.harness import full_tensor, run_distributed

NORMS = [1.0, 2.0, 3.5, math.inf]


def parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    made = []
    for shape in ((3, 4), (5,), (2, 2), ()):
        parameter = nn.Parameter(torch.zeros(shape, dtype=torch.float64))
        parameter.grad = torch.randn(shape, generator=generator, dtype=torch.float64)
        made.append(parameter)
    made.append(nn.Parameter(torch.zeros(7)))  # without gradient
    return made


@pytest.mark.parametrize("norm_type", NORMS)
def test_norm_and_clipped_gradients_equal_torch(norm_type: float) -> None:
    ours, theirs = parameters(), parameters()
    norm = clip_gradient_norm([*ours, ours[0]], 0.5, norm_type)  # given twice, counted and scaled once
    expected = torch.nn.utils.clip_grad_norm_(theirs, 0.5, norm_type)
    torch.testing.assert_close(norm, expected)
    for mine, other in zip(ours[:-1], theirs[:-1], strict=True):
        torch.testing.assert_close(mine.grad, other.grad)


def test_gradients_within_the_bound_are_left_to_the_bit() -> None:
    ours, before = parameters(), [parameter.grad for parameter in parameters()]
    clip_gradient_norm(ours, 1e3)
    assert all(torch.equal(p.grad, grad) for p, grad in zip(ours[:-1], before[:-1], strict=True))


def test_every_element_is_bounded_by_value() -> None:
    ours, theirs = parameters(), parameters()
    clip_gradient_value(ours, 0.3)
    torch.nn.utils.clip_grad_value_(theirs, 0.3)
    for mine, other in zip(ours[:-1], theirs[:-1], strict=True):
        assert torch.equal(mine.grad, other.grad)


def test_norm_without_gradients_is_zero() -> None:
    assert float(gradient_norm([nn.Parameter(torch.ones(2))])) == 0.0


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_nan_shows_in_the_norm(norm_type: float) -> None:
    [first, *_] = ours = parameters()
    first.grad[0, 0] = math.nan
    assert math.isnan(gradient_norm(ours, norm_type))


def clip_on_two_meshes(norm_type: float) -> tuple[Tensor, list[Tensor]]:
    """On four ranks: one gradient over all of them, one over pairs, the others plain; 5 rows do not divide."""
    everybody, hybrid = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2), mesh_dim_names=("r", "s"))
    made = parameters()[:-1]
    for index, mesh in ((0, everybody), (1, hybrid["s"])):
        full = made[index].grad
        made[index] = nn.Parameter(distribute_tensor(torch.zeros_like(full), mesh, [Shard(0)]))
        made[index].grad = distribute_tensor(full, mesh, [Shard(0)])
    norm = clip_gradient_norm(made, 0.5, norm_type)
    return norm, [full_tensor(parameter.grad) for parameter in made]


def clip_all_norms() -> list[tuple[Tensor, list[Tensor]]]:
    return [clip_on_two_meshes(norm_type) for norm_type in NORMS]


def test_sharded_and_plain_gradients_on_several_meshes_have_one_norm_on_all_ranks() -> None:
    results = run_distributed(clip_all_norms, 4)
    for rank_results in results:
        for norm_type, (norm, gradients) in zip(NORMS, rank_results, strict=True):
            expected = parameters()
            torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(expected, 0.5, norm_type))
            for mine, other in zip(gradients, expected, strict=False):
                torch.testing.assert_close(mine, other.grad)
    assert len({tuple(float(norm) for norm, _ in rank_results) for rank_results in results}) == 1
    assert not dist.is_initialized()
