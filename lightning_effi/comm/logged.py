"""Reducing logged values over the data-parallel ranks.

Two faults of the stock reduction are mended on the way: the mean of integer counts is not rounded down, and values
that ranks logged under different names are not averaged with each other.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_effi.compat import lightning as lightning_compat

if TYPE_CHECKING:
    import lightning.pytorch as pl

_MEAN = ("mean", "avg")
_SUM = ("sum",)


def reduce_logged(tensor: Tensor, group: Any, reduce_op: Any, module: pl.LightningModule | None) -> Tensor:
    """``tensor`` reduced over ``group``; the argument is left as it is.

    A scalar that is averaged or summed while a loop is logging carries a fingerprint of the names logged so far in the
    same message.

    Raises:
        RuntimeError: on all ranks, where they logged different names with ``sync_dist=True``.
    """
    if hasattr(tensor, "full_tensor"):
        tensor = tensor.full_tensor()
    operation = reduce_op.lower() if isinstance(reduce_op, str) else reduce_op
    is_mean = operation in _MEAN
    if is_mean and not tensor.is_floating_point():
        tensor = tensor.to(torch.get_default_dtype())
    is_sum = operation in _SUM or operation == dist.ReduceOp.SUM
    trainer = None if module is None else module._trainer
    keys = (
        [] if trainer is None or tensor.dim() or not (is_mean or is_sum) else lightning_compat.synced_log_keys(trainer)
    )
    if not keys or not tensor.is_floating_point():
        return lightning_compat.sync_reduce(tensor.clone(), group, reduce_op)
    total = _sum_of_same_names(tensor, keys, group)
    return total / dist.get_world_size(group) if is_mean else total


def _sum_of_same_names(value: Tensor, keys: list[str], group: Any) -> Tensor:
    """One all-reduce for the value and for the proof that all ranks mean the same thing.

    The fingerprints ``f`` are equal exactly if ``n * sum(f**2) == sum(f)**2``; with 16 bits all terms are exact in
    double precision for up to a million ranks.
    """
    fingerprint = zlib.crc32("\n".join(keys).encode()) & 0xFFFF
    proof = torch.tensor([fingerprint, fingerprint**2], dtype=torch.float64, device=value.device)
    message = torch.cat([value.detach().double().reshape(1), proof])
    dist.all_reduce(message, group=group)
    total, first, second = message.unbind()
    if (second * dist.get_world_size(group) != first**2).item():
        everybody: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(everybody, keys, group=group)
        _raise_different_names(everybody)
    return total.to(value.dtype)


def _raise_different_names(everybody: list[list[str]]) -> None:
    common = set(everybody[0]).intersection(*everybody[1:])
    only = {rank: sorted(set(keys) - common) for rank, keys in enumerate(everybody)}
    listing = "; ".join(f"rank {rank} only: {', '.join(keys)}" for rank, keys in only.items() if keys)
    if not listing:
        listing = "; ".join(f"order of rank {rank}: {', '.join(keys)}" for rank, keys in enumerate(everybody))
    raise RuntimeError(
        "self.log(..., sync_dist=True) was called under different names, or in another order, on different ranks, whose"
        f" values would be averaged with each other ({listing}). Log the same names in the same order on all ranks, or"
        " use sync_dist=False for those that depend on the batch"
    )
