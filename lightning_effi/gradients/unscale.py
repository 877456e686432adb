"""Dividing gradients by the loss scale, and one answer of all ranks to whether they are finite."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_effi.compat import dtensor as dtensor_compat
from lightning_effi.compat import torch as torch_compat


@dataclass(frozen=True)
class Found:
    """What the ranks found in their gradients, together.

    Attributes:
        overflow: whether any rank holds a value that is not finite.
        gradients: whether any rank holds a gradient at all.
    """

    overflow: bool
    gradients: bool


@torch.no_grad()
def unscale_gradients(optimizer: Optimizer, scale: float, device: torch.device, group: Any | None) -> Found:
    """Divide the gradients of an optimizer's parameters by ``scale``, in place.

    Every rank looks at the part that it holds. Data-parallel ranks see other shards, tensor-parallel ranks other rows,
    pipeline stages other layers: an overflow in any of them must stop all, so every rank of the run must call this,
    also one that holds no gradient.

    Args:
        optimizer: whose gradients are divided; a parameter in two groups counts once.
        scale: the loss scale.
        device: where the message of the ranks is made.
        group: all ranks of the run; ``None``: there is only this one.
    """
    inverse = 1.0 / scale
    found = torch.zeros(2, device=device)
    for gradients in _by_kind(optimizer).values():
        found[1] = 1.0
        overflow = torch.zeros((), device=gradients[0].device)
        torch_compat.unscale_and_check(gradients, overflow, torch.full_like(overflow, inverse))
        found[0] = torch.maximum(found[0], overflow.to(device))
    if group is not None:
        dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
    overflow, gradients = found.tolist()
    return Found(bool(overflow), bool(gradients))


def first_nonfinite(module: nn.Module) -> tuple[int, str] | None:
    """Position and name of the first parameter whose gradient has, on this rank, a value that is not finite."""
    for position, (name, parameter) in enumerate(module.named_parameters()):
        if parameter.grad is not None and not bool(_values(parameter.grad).isfinite().all()):
            return position, name
    return None


def _by_kind(optimizer: Optimizer) -> dict[Any, list[Tensor]]:
    """Local parts of all gradients, by device and dtype."""
    by_kind: dict[Any, list[Tensor]] = {}
    for parameter in _unique(p for group in optimizer.param_groups for p in group["params"]):
        if parameter.grad is not None:
            values = _values(parameter.grad)
            by_kind.setdefault((values.device, values.dtype), []).append(values)
    return by_kind


def _unique(parameters: Iterable[Tensor]) -> Iterable[Tensor]:
    return {id(parameter): parameter for parameter in parameters}.values()


def _values(gradient: Tensor) -> Tensor:
    local = dtensor_compat.local_tensor(gradient)
    return local._values() if local.is_sparse else local
