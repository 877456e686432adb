"""Cross entropy of logits whose classes are spread over the ranks of a group.

Two messages of a few numbers a row replace the gathering of all logits: the largest logit, and then together the sum of
exponentials, the target's logit and (for label smoothing) the sum of all logits. Every rank comes out with the same
loss, and with the gradient of its own part (Megatron-LM, arXiv:1909.08053, section 3, without smoothing or weights).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_effi.tensor_parallel.collectives import part_of, reduce, take
from lightning_effi.tensor_parallel.split import Split


class PartialCrossEntropy(torch.autograd.Function):
    """``(losses, divisor)`` for targets that are class numbers.

    With weights ``w``, smoothing ``e`` and ``V`` classes, the loss of a row with target ``y`` is
    ``-(1 - e)·w[y]·log p[y] - e/V·Σ w[c]·log p[c]``, and 0 where it is ignored. ``divisor`` is what
    ``reduction="mean"`` divides the sum by: the weights of the targets, which torch uses for the smoothed part too.

    Args of ``apply``:
        logits: ``[..., part of V]``, in fp32 or fp64.
        target: ``[...]``, class numbers.
        ignored: ``[...]``, which rows do not count.
        weight: ``[V]`` or ``None``.
        smoothing: ``e``.
        split: how the classes are split.

    Raises:
        IndexError: for class numbers that do not exist, on all ranks.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, ignored: Tensor, weight: Tensor | None, smoothing: float, split: Split
    ) -> tuple[Tensor, Tensor]:
        extent, group = split.size, split.group
        start, here = part_of(extent, group.rank, group.size)
        target = target.long().masked_fill(ignored, 0)
        weights = logits.new_ones(extent) if weight is None else weight
        local_weights = weights.narrow(0, start, here)
        # ``gather`` refuses what indexing takes for a position from the end
        target_weight = weights.gather(0, target.flatten()).view_as(target).masked_fill(ignored, 0.0)

        shifted = logits - _largest(logits, split)
        foreign = (target < start) | (target >= start + here)
        index = target.sub(start).masked_fill(foreign, 0)[..., None]
        own = torch.zeros_like(target_weight)
        if here:
            own = shifted.gather(-1, index).squeeze(-1).masked_fill(foreign, 0.0)
        sums = torch.stack(
            [
                shifted.exp().sum(-1),
                own,
                own if not smoothing else shifted.sum(-1) if weight is None else shifted @ local_weights,
            ]
        )
        dist.all_reduce(sums, group=group.process_group)
        log_sum, own, weighted = sums[0].log(), sums[1], sums[2]

        spread = smoothing / extent
        losses = (1 - smoothing) * target_weight * (log_sum - own)
        if smoothing:
            losses = losses + spread * (weights.sum() * log_sum - weighted).masked_fill(ignored, 0.0)
        ctx.smoothing, ctx.spread, ctx.here = smoothing, spread, here
        ctx.save_for_backward(shifted, log_sum, index, foreign, ignored, target_weight, local_weights, weights.sum())
        divisor = target_weight.sum()
        ctx.mark_non_differentiable(divisor)
        return losses, divisor

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> Any:  # type: ignore[override]
        shifted, log_sum, index, foreign, ignored, target_weight, local_weights, total = ctx.saved_tensors
        certain = (1 - ctx.smoothing) * target_weight * gradient
        spread = (ctx.spread * gradient).masked_fill(ignored, 0.0)
        result = (shifted - log_sum[..., None]).exp_().mul_((certain + spread * total)[..., None])
        if ctx.smoothing:
            result.sub_(spread[..., None] * local_weights)
        if ctx.here:
            result.scatter_add_(-1, index, -certain.masked_fill(foreign, 0.0)[..., None])
        return result, None, None, None, None, None


def soft_cross_entropy(
    logits: Tensor, target: Tensor, weight: Tensor | None, smoothing: float, split: Split
) -> tuple[Tensor, int]:
    """``(losses, divisor)`` as above, for replicated targets that are probabilities ``[..., V]``."""
    extent = split.size
    target = target.to(logits.dtype)
    if smoothing:
        target = target * (1 - smoothing) + smoothing / extent
    if weight is not None:
        target = target * weight
    shifted = logits - _largest(logits, split)
    local = take(target, target.dim() - 1, (extent,), split.group)
    # p·(log Σexp - x), summed over the classes: the first part needs only the sum of p, which every rank has
    log_sum = _PartialLogSum.apply(shifted, split)
    losses = target.sum(-1) * log_sum - reduce((local * shifted).sum(-1), split.group)
    return losses, losses.numel()


class _PartialLogSum(torch.autograd.Function):
    """``log Σ exp(x)`` over all classes; replicated."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, split: Split) -> Tensor:
        total = logits.exp().sum(-1)
        dist.all_reduce(total, group=split.group.process_group)
        result = total.log()
        ctx.save_for_backward(logits, result)
        return result

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        logits, result = ctx.saved_tensors
        return (logits - result[..., None]).exp() * gradient[..., None], None


def _largest(logits: Tensor, split: Split) -> Tensor:
    """The largest logit of each row, over all classes; a constant, since it cancels out."""
    logits = logits.detach()
    if logits.shape[-1]:
        largest = logits.amax(-1, keepdim=True)
    else:
        largest = logits.new_full((*logits.shape[:-1], 1), -torch.inf)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=split.group.process_group)
    return largest
