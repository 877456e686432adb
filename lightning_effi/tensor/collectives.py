"""The five ways between a replicated tensor and one that is split over a tensor-parallel group.

A *replicated* tensor has the same value and the same, complete gradient on every rank. A *split* one is this rank's
part of a whole. Each function below and its backward keep both promises (Megatron-LM, arXiv:1909.08053, calls
:func:`share` *f* and :func:`reduce` *g*), so that whatever is composed of them has right gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_effi import _compat


@dataclass(frozen=True)
class TensorGroup:
    """The ranks among which heads and widths are split, and this rank's place among them."""

    process_group: Any
    rank: int
    size: int

    def __deepcopy__(self, memo: Any) -> TensorGroup:
        return self  # copies of a module (for moving averages, say) work in the same group


def share(tensor: Tensor, group: TensorGroup) -> Tensor:
    """Use a replicated tensor in a computation that is split: what the ranks' parts pull on it is added up."""
    if not (tensor.requires_grad and torch.is_grad_enabled()):
        return tensor
    return _Share.apply(tensor, group)  # type: ignore[no-any-return]


def reduce(tensor: Tensor, group: TensorGroup) -> Tensor:
    """The sum of the ranks' contributions; replicated."""
    return _Reduce.apply(tensor, group)  # type: ignore[no-any-return]


def take(tensor: Tensor, dim: int, pieces: tuple[int, ...], group: TensorGroup) -> Tensor:
    """This rank's part of a replicated tensor. A single piece need not be divisible, see :func:`part_of`."""
    return _Take.apply(tensor, dim, pieces, group)  # type: ignore[no-any-return]


def gather(tensor: Tensor, dim: int, pieces: tuple[int, ...], group: TensorGroup) -> Tensor:
    """The whole of a split tensor; replicated."""
    return _Gather.apply(tensor, dim, pieces, group)  # type: ignore[no-any-return]


def exchange(tensor: Tensor, dim: int, pieces: tuple[int, ...], group: TensorGroup) -> Tensor:
    """Rows as they are stored (rank r has the r-th part of all) → as they are used (the r-th part of each piece)."""
    return _Exchange.apply(tensor, dim, pieces, group)  # type: ignore[no-any-return]


def part_of(extent: int, rank: int, size: int) -> tuple[int, int]:
    """Where the part of rank ``rank`` of ``size`` begins in a dim of ``extent``, and how long it is.

    As ``torch.chunk`` and DTensor cut: all parts are alike but the last ones, which may be shorter or empty.
    """
    longest = -(-extent // size)
    start = min(rank * longest, extent)
    return start, min(longest, extent - start)


@lru_cache(maxsize=512)
def rows_of(rank: int, pieces: tuple[int, ...], size: int) -> Tensor:
    """Which rows of the whole rank ``rank`` of ``size`` uses: the ``rank``-th part of each piece, in order."""
    parts, start = [], 0
    for piece in pieces:
        part = piece // size
        parts.append(torch.arange(start + rank * part, start + (rank + 1) * part))
        start += piece
    return torch.cat(parts)


class _Share(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: TensorGroup) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _all_reduce(gradient, ctx.group), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: TensorGroup) -> Tensor:
        return _all_reduce(tensor, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int, pieces: tuple[int, ...], group: TensorGroup) -> Tensor:
        ctx.dim, ctx.pieces, ctx.group = dim, pieces, group
        return _local_part(tensor, dim, pieces, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _whole(gradient, ctx.dim, ctx.pieces, ctx.group), None, None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int, pieces: tuple[int, ...], group: TensorGroup) -> Tensor:
        ctx.dim, ctx.pieces, ctx.group = dim, pieces, group
        return _whole(tensor, dim, pieces, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _local_part(gradient, ctx.dim, ctx.pieces, ctx.group), None, None, None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int, pieces: tuple[int, ...], group: TensorGroup) -> Tensor:
        ctx.dim, ctx.pieces, ctx.group = dim, pieces, group
        route = _route(group.rank, pieces, group.size)
        return _send(tensor, dim, route.stored_order, route.sent, route.received, None, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        route = _route(ctx.group.rank, ctx.pieces, ctx.group.size)
        back = torch.argsort(route.stored_order)
        return _send(gradient, ctx.dim, None, route.received, route.sent, back, ctx.group), None, None, None


@dataclass(frozen=True, eq=False)
class _Route:
    """How rows travel between the stored and the used order: whose rows go where, in how many each."""

    stored_order: Tensor
    sent: tuple[int, ...]
    received: tuple[int, ...]


@lru_cache(maxsize=512)
def _route(rank: int, pieces: tuple[int, ...], size: int) -> _Route:
    rows = sum(pieces) // size
    first = rank * rows
    order, sent = [], []
    for other in range(size):
        wanted = rows_of(other, pieces, size)
        mine = wanted[(wanted >= first) & (wanted < first + rows)] - first
        order.append(mine)
        sent.append(len(mine))
    # what arrives is sorted by its sender, that is, by its place in the whole: just the order in which it is used
    used = rows_of(rank, pieces, size)
    received = [int(((used >= other * rows) & (used < (other + 1) * rows)).sum()) for other in range(size)]
    return _Route(torch.cat(order), tuple(sent), tuple(received))


def _send(
    tensor: Tensor,
    dim: int,
    before: Tensor | None,
    sent: Sequence[int],
    received: Sequence[int],
    after: Tensor | None,
    group: TensorGroup,
) -> Tensor:
    rows = tensor.movedim(dim, 0)
    rows = rows.index_select(0, before.to(tensor.device)) if before is not None else rows.contiguous()
    arrived = torch.empty((sum(received), *rows.shape[1:]), dtype=rows.dtype, device=rows.device)
    dist.all_to_all_single(arrived, rows, list(received), list(sent), group=group.process_group)
    if after is not None:
        arrived = arrived.index_select(0, after.to(tensor.device))
    return arrived.movedim(0, dim)


def _all_reduce(tensor: Tensor, group: TensorGroup) -> Tensor:
    total = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group.process_group)
    return total


def _local_part(tensor: Tensor, dim: int, pieces: tuple[int, ...], group: TensorGroup) -> Tensor:
    if len(pieces) == 1:
        return tensor.narrow(dim, *part_of(pieces[0], group.rank, group.size)).contiguous()
    return tensor.index_select(dim, rows_of(group.rank, pieces, group.size).to(tensor.device))


def _whole(tensor: Tensor, dim: int, pieces: tuple[int, ...], group: TensorGroup) -> Tensor:
    rows = tensor.movedim(dim, 0).contiguous()
    longest = -(-sum(pieces) // group.size)
    if missing := longest - len(rows):  # shorter parts are the last ones, so that what is added ends up behind all
        rows = torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])])
    everybody = torch.empty((longest * group.size, *rows.shape[1:]), dtype=rows.dtype, device=rows.device)
    _compat.all_gather_rows(everybody, rows, group.process_group)
    everybody = everybody[: sum(pieces)]
    if len(pieces) > 1:
        order = torch.cat([rows_of(rank, pieces, group.size) for rank in range(group.size)])
        everybody = everybody.index_select(0, torch.argsort(order).to(tensor.device))
    return everybody.movedim(0, dim)
