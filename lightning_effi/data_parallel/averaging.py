"""The mean of whole gradients over the ranks, when a backward is over."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_effi.comm.agreement import Agreement

_BYTES_PER_MESSAGE = 25 * 2**20  # as DistributedDataParallel


@torch.no_grad()
def average_gradients(module: nn.Module, group: Any, agreement: Agreement) -> None:
    """Average the gradients of ``module``'s parameters; all ranks must call this.

    A parameter that only some ranks used counts as zeros on the others. One that no rank used keeps no gradient, as in
    one process. Gradients that were averaged before and have grown since are averaged as a whole: the mean is linear.

    Raises:
        RuntimeError: for a sparse gradient.
    """
    trainable = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    used = agreement.any([parameter.grad is not None for parameter in trainable.values()])
    gradients: list[Tensor] = []
    for (name, parameter), is_used in zip(trainable.items(), used, strict=True):
        if not is_used:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        if parameter.grad.is_sparse:
            raise RuntimeError(
                f"'{name}' has a sparse gradient in a step with reentrant checkpoints, which is averaged in one message"
                " with others. Use checkpoint(..., use_reentrant=False), or a dense gradient (sparse=False)"
            )
        gradients.append(parameter.grad)
    for bucket in _buckets(gradients):
        flat = torch.cat([gradient.reshape(-1) for gradient in bucket]).div_(dist.get_world_size(group))
        dist.all_reduce(flat, group=group)
        for gradient, mean in zip(bucket, flat.split([gradient.numel() for gradient in bucket]), strict=True):
            gradient.copy_(mean.view(gradient.shape))


def _buckets(gradients: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Gradients of one dtype together, up to the size of a message."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for gradient in gradients:
        by_dtype.setdefault(gradient.dtype, []).append(gradient)
    for alike in by_dtype.values():
        bucket: list[Tensor] = []
        size = 0
        for gradient in alike:
            bucket.append(gradient)
            size += gradient.numel() * gradient.element_size()
            if size >= _BYTES_PER_MESSAGE:
                yield bucket
                bucket, size = [], 0
        if bucket:
            yield bucket
