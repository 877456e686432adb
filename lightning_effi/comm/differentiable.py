"""Gathering tensors of all ranks so that gradients flow back to each."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def gather_with_gradients(tensor: Tensor, group: Any) -> Tensor:
    """``[*shape]`` on each rank of ``group`` → ``[ranks, *shape]`` on all.

    The gradient of a rank's tensor is the sum of what all ranks make of it. Torch's own
    (``torch.distributed.nn.functional.all_gather``) takes places in the group for ranks of the run in gloo's backward.
    """
    return _Gather.apply(tensor, group)  # type: ignore[no-any-return]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any) -> Tensor:
        ctx.group = group
        gathered = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(group.size())]
        dist.all_gather(gathered, tensor.contiguous(), group=group)
        return torch.stack(gathered)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        total = gradient.contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total[ctx.group.rank()], None
