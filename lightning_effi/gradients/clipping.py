"""Gradient norms and clipping over gradients that are sharded, replicated or both.

``torch.nn.utils.clip_grad_norm_`` refuses mixtures of meshes and of sharded and plain gradients. The norm here is the
norm of the whole, unsharded gradient: shards are added up over their ranks, replicated gradients count once.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_effi.compat import dtensor as dtensor_compat
from lightning_effi.compat import torch as torch_compat


class Stages(Protocol):
    """The ranks of a pipeline, each of which holds other parameters, and copies of shared ones."""

    def counts(self, parameter: Tensor) -> bool: ...

    def counted(self) -> Iterable[nn.Parameter]: ...

    def reduce(self, value: Tensor, operation: Any) -> Tensor: ...


def gradient_norm(parameters: Iterable[nn.Parameter], norm_type: float = 2.0, stages: Stages | None = None) -> Tensor:
    """The p-norm (``inf`` for the maximum) over all gradients together; a 0-dim tensor, equal on all ranks.

    A parameter given twice, or held by several stages of a pipeline, counts once. Without any gradient the norm is 0.
    """
    if stages is not None:
        parameters = [parameter for parameter in parameters if stages.counts(parameter)]
    return _norm(_gradients(parameters), norm_type, stages)


@contextmanager
def norms_over(stages: Stages | None) -> Iterator[None]:
    """Inside, ``torch.nn.utils.clip_grad_norm_`` of the module's own code clips by the norm over all stages.

    Each stage's own norm would give each stage another coefficient, without a word. Every stage must make the call.
    """

    def norm(gradients: Sequence[Tensor], norm_type: float) -> Tensor:
        assert stages is not None
        given = {id(gradient) for gradient in gradients}
        counted = [p.grad for p in stages.counted() if p.grad is not None and id(p.grad) in given]
        return _norm(counted, norm_type, stages)

    with torch_compat.total_norm_replaced(None if stages is None else norm):
        yield


@torch.no_grad()
def norm_of_each(tensors: Iterable[Tensor], norm_type: float = 2.0, dtype: torch.dtype | None = None) -> list[Tensor]:
    """``torch._foreach_norm`` for sharded and plain tensors together: plain 0-dim tensors, equal on all ranks."""
    tensors, norm_type = list(tensors), float(norm_type)
    norms: dict[int, Tensor] = {}
    for placement, indices in _by_placement(tensors).items():
        local = [dtensor_compat.local_tensor(tensors[index]) for index in indices]
        # a rank may hold no row of a short parameter, and an empty tensor has no maximum
        each = [torch.linalg.vector_norm(t, norm_type, dtype=dtype) if t.numel() else t.new_zeros(()) for t in local]
        powers = torch.stack([norm.to(each[0]) for norm in each])
        if norm_type != torch.inf:
            powers = powers**norm_type
        powers = _reduce_over_shards(powers, placement, norm_type)
        whole = powers if norm_type == torch.inf else powers ** (1.0 / norm_type)
        norms |= {index: whole[i].to(each[i]) for i, index in enumerate(indices)}
    return [norms[index] for index in range(len(tensors))]


def _norm(gradients: Iterable[Tensor], norm_type: float, stages: Stages | None) -> Tensor:
    gradients = list(gradients)
    parts = []
    for placement, indices in _by_placement(gradients).items():
        found = [dtensor_compat.local_tensor(gradients[index]) for index in indices]
        # a rank may hold no row of a short parameter, and an empty tensor has no maximum
        part = torch.nn.utils.get_total_norm([g for g in found if g.numel()], norm_type)
        dtype = functools.reduce(torch.promote_types, (g.dtype for g in found))
        part = part.to(found[0].device, dtype)  # also where nothing was left, so that all ranks send alike
        if norm_type != torch.inf:
            part = part**norm_type
        parts.append(_reduce_over_shards(part, placement, norm_type))
    if not parts and stages is None:
        return torch.zeros(())
    total = torch.stack([part.to(parts[0].device) for part in parts or [torch.zeros(())]])
    total = total.max() if norm_type == torch.inf else total.sum()
    if stages is not None:
        operation = dist.ReduceOp.MAX if norm_type == torch.inf else dist.ReduceOp.SUM
        total = stages.reduce(total.double(), operation).to(total.dtype)
    return total if norm_type == torch.inf else total ** (1.0 / norm_type)


@torch.no_grad()
def clip_gradient_norm(
    parameters: Iterable[nn.Parameter],
    max_norm: float,
    norm_type: float = 2.0,
    stages: Stages | None = None,
    loss_scale: float = 1.0,
) -> Tensor:
    """Scale all gradients so that their joint norm is at most ``max_norm``; returns the norm before.

    The coefficient is that of ``torch.nn.utils.clip_grad_norm_``: ``min(1, max_norm / (norm + 1e-6))``. Gradients that
    are still multiplied with a ``loss_scale`` stay so, and the norms are those of the gradients without it.
    """
    parameters = list(parameters)
    norm = gradient_norm(parameters, norm_type, stages) / loss_scale
    coefficient = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for gradients in _by_device(parameters).values():
        torch._foreach_mul_(gradients, coefficient.to(gradients[0].device))
    return norm


@torch.no_grad()
def clip_gradient_value(parameters: Iterable[nn.Parameter], clip_value: float) -> None:
    """Bound every element of every gradient to ``[-clip_value, clip_value]``."""
    for gradients in _by_device(parameters).values():
        torch._foreach_clamp_min_(gradients, -clip_value)
        torch._foreach_clamp_max_(gradients, clip_value)


def _gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    unique = {id(parameter): parameter for parameter in parameters}
    return [parameter.grad for parameter in unique.values() if parameter.grad is not None]


def _by_device(parameters: Iterable[nn.Parameter]) -> dict[torch.device, list[Tensor]]:
    by_device: dict[torch.device, list[Tensor]] = {}
    for gradient in _gradients(parameters):
        local = dtensor_compat.local_tensor(gradient)
        by_device.setdefault(local.device, []).append(local)
    return by_device


def _by_placement(gradients: Sequence[Tensor]) -> dict[Any, list[int]]:
    """Indices of the gradients that are summed over the same ranks; key ``None`` for plain ones."""
    by_placement: dict[Any, list[int]] = {}
    for index, gradient in enumerate(gradients):
        by_placement.setdefault(_placement(gradient), []).append(index)
    return by_placement


def _placement(gradient: Tensor) -> Any:
    mesh = getattr(gradient, "device_mesh", None)
    return None if mesh is None else (mesh, tuple(gradient.placements))  # type: ignore[attr-defined]


def _reduce_over_shards(part: Tensor, placement: Any, norm_type: float) -> Tensor:
    if placement is None:
        return part
    mesh, placements = placement
    operation = dist.ReduceOp.MAX if norm_type == torch.inf else dist.ReduceOp.SUM
    for dim, where in enumerate(placements):
        if dtensor_compat.is_sharded(where):
            dist.all_reduce(part, operation, group=mesh.get_group(dim))
    return part
