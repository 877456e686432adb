"""The ways between a replicated tensor and one that is split over a tensor-parallel group.

A *replicated* tensor has the same value and the same, complete gradient on every rank. A *split* one is this rank's
part of a whole. Each function below and its backward keep both promises (Megatron-LM, arXiv:1909.08053, calls
:func:`share` *f* and :func:`reduce` *g*), so that whatever is composed of them has right gradients; backwards are made
of these functions, so that gradients of gradients are right, too. Sequence parallelism (arXiv:2205.05198) enters and
leaves a split computation from parts (:func:`assemble`, :func:`scatter_sum`).

A dim that is one piece need not be divisible: the first ranks then hold one row more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_effi.compat import torch as torch_compat


@dataclass(frozen=True)
class TensorGroup:
    """The ranks among which heads and widths are split, and this rank's place among them."""

    process_group: Any
    rank: int
    size: int

    def __deepcopy__(self, memo: Any) -> TensorGroup:
        return self  # copies of a module (for moving averages, say) work in the same group


def share(tensor: Tensor, group: TensorGroup) -> Tensor:
    """Use a replicated tensor in a computation that is split; the backward is an all-reduce.

    Args:
        tensor: any shape, the same values on every rank.
        group: the ranks that go on with it.

    Returns:
        the same values, of the same shape.
    """
    [shared] = share_all([tensor], group)
    return shared


def share_all(tensors: Sequence[Tensor], group: TensorGroup) -> list[Tensor]:
    """:func:`share` each of ``tensors``, whose gradients are all-reduced in one message (a norm's weight and bias)."""
    if not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in tensors):
        return list(tensors)
    return list(_Share.apply(group, *tensors))


def reduce(tensor: Tensor, group: TensorGroup) -> Tensor:
    """All-reduce: the sum of the ranks' summands; the backward passes the gradient on.

    Args:
        tensor: this rank's summand, of any shape that all ranks share.
        group: the ranks whose summands are added up.

    Returns:
        the sum, of the same shape; replicated.
    """
    return _Reduce.apply(tensor, group)  # type: ignore[no-any-return]


def take(tensor: Tensor, dim: int, pieces: tuple[int, ...], group: TensorGroup) -> Tensor:
    """Keep this rank's part of a replicated tensor; the backward is an all-gather.

    Args:
        tensor: ``[..., rows, ...]``, the same values on every rank.
        dim: the dim of ``rows``.
        pieces: what ``rows`` consists of, each split by itself. A single piece need not be divisible, see
            :func:`part_of`.
        group: the ranks that split it.

    Returns:
        ``[..., rows / size, ...]``.
    """
    return _Move.apply(tensor, dim, pieces, group, _local_part, gather)  # type: ignore[no-any-return]


def gather(tensor: Tensor, dim: int, pieces: tuple[int, ...], group: TensorGroup) -> Tensor:
    """All-gather for a computation that every rank does whole; the backward keeps this rank's part.

    Args:
        tensor: ``[..., rows / size, ...]``, this rank's part.
        dim: the dim of ``rows``.
        pieces: what ``rows`` consists of, each split by itself.
        group: the ranks that split it.

    Returns:
        ``[..., rows, ...]``; replicated.
    """
    return _Move.apply(tensor, dim, pieces, group, _whole, take)  # type: ignore[no-any-return]


def exchange(tensor: Tensor, dim: int, pieces: tuple[int, ...], group: TensorGroup) -> Tensor:
    """All-to-all from rows as they are stored to rows as they are used; the backward is the way back.

    Args:
        tensor: ``[..., rows / size, ...]``, on rank r the r-th part of all rows.
        dim: the dim of ``rows``.
        pieces: what ``rows`` consists of, each divisible by the group's size.
        group: the ranks that split it.

    Returns:
        ``[..., rows / size, ...]``, on rank r the r-th part of each piece.
    """
    return _Exchange.apply(tensor, dim, pieces, group)  # type: ignore[no-any-return]


def part_of(extent: int, rank: int, size: int) -> tuple[int, int]:
    """Where the part of rank ``rank`` of ``size`` begins in a dim of ``extent``, and how long it is.

    As ``torch.chunk`` and DTensor cut: all parts are alike but the last ones, which may be shorter or empty.
    """
    longest = -(-extent // size)
    start = min(rank * longest, extent)
    return start, min(longest, extent - start)


def assemble(tensor: Tensor, dim: int, pieces: tuple[int, ...], group: TensorGroup) -> Tensor:
    """All-gather for a computation that is split; the backward is a reduce-scatter.

    Args:
        tensor: ``[..., rows / size, ...]``, this rank's part.
        dim: the dim of ``rows``.
        pieces: what ``rows`` consists of, each split by itself.
        group: the ranks that split it.

    Returns:
        ``[..., rows, ...]``, the same values on every rank, whose gradients are added up.
    """
    return _Move.apply(tensor, dim, pieces, group, _whole, scatter_sum)  # type: ignore[no-any-return]


def scatter_sum(tensor: Tensor, dim: int, pieces: tuple[int, ...], group: TensorGroup) -> Tensor:
    """Reduce-scatter: this rank's part of the sum of the ranks' summands; the backward is an all-gather.

    Args:
        tensor: ``[..., rows, ...]``, this rank's summand.
        dim: the dim of ``rows``.
        pieces: what ``rows`` consists of, each split by itself.
        group: the ranks whose summands are added up.

    Returns:
        ``[..., rows / size, ...]``.
    """
    return _Move.apply(tensor, dim, pieces, group, _part_of_sum, assemble)  # type: ignore[no-any-return]


def contribute(tensor: Tensor, group: TensorGroup) -> Tensor:
    """A replicated summand of a sum over the ranks: it counts once, and has the gradient of the sum on every rank.

    Args:
        tensor: any shape, the same values on every rank.
        group: the ranks whose summands are added up.

    Returns:
        the values on the first rank and zeros on the others, of the same shape.
    """
    return _Contribute.apply(tensor, group)  # type: ignore[no-any-return]


@lru_cache(maxsize=512)
def rows_of(rank: int, pieces: tuple[int, ...], size: int) -> Tensor:
    """Which rows of the whole rank ``rank`` of ``size`` uses: the ``rank``-th part of each piece, in order."""
    parts, start = [], 0
    for piece in pieces:
        first, rows = part_of(piece, rank, size)
        parts.append(torch.arange(start + first, start + first + rows))
        start += piece
    return torch.cat(parts)


class _Share(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: TensorGroup, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        if len(gradients) == 1 or torch.is_grad_enabled():
            return None, *(reduce(gradient, ctx.group) for gradient in gradients)
        total = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(total, group=ctx.group.process_group)
        parts = total.split([gradient.numel() for gradient in gradients])
        return None, *(part.view(g.shape).to(g.dtype) for part, g in zip(parts, gradients, strict=True))


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: TensorGroup) -> Tensor:
        ctx.group = group
        return _all_reduce(tensor, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return share(gradient, ctx.group), None


_Way = Callable[[Tensor, int, tuple[int, ...], TensorGroup], Tensor]


class _Move(torch.autograd.Function):
    """``way(tensor, dim, pieces, group)``, between wholes and parts; gradients go ``back``, itself such a way."""

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, dim: int, pieces: tuple[int, ...], group: TensorGroup, way: _Way, back: _Way
    ) -> Tensor:
        ctx.dim, ctx.pieces, ctx.group, ctx.back = dim, pieces, group, back
        return way(tensor, dim, pieces, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.back(gradient, ctx.dim, ctx.pieces, ctx.group), None, None, None, None, None


class _Contribute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: TensorGroup) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor) if group.rank == 0 else torch.zeros_like(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _CountOnce.apply(gradient, ctx.group), None


class _CountOnce(torch.autograd.Function):
    """The gradient of :func:`contribute`: what is the same on all ranks goes into a sum over the ranks once."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: TensorGroup) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return contribute(gradient, ctx.group), None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, dim: int, pieces: tuple[int, ...], group: TensorGroup, back: bool = False
    ) -> Tensor:
        ctx.dim, ctx.pieces, ctx.group, ctx.back = dim, pieces, group, back
        route = _route(group.rank, pieces, group.size)
        if back:
            return _send(tensor, dim, None, route.received, route.sent, torch.argsort(route.stored_order), group)
        return _send(tensor, dim, route.stored_order, route.sent, route.received, None, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        back = _Exchange.apply(gradient, ctx.dim, ctx.pieces, ctx.group, not ctx.back)
        return back, None, None, None, None


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
        return tensor.narrow(dim, *part_of(pieces[0], group.rank, group.size)).clone()  # its dims in the same order
    return tensor.index_select(dim, rows_of(group.rank, pieces, group.size).to(tensor.device))


def laid_out_like(model: Tensor, values: Tensor) -> Tensor:
    """``values`` with the dims in memory in the order of those of ``model``, in which random numbers fill them."""
    strides = model.stride()
    order = sorted(range(model.dim()), key=lambda dim: -strides[dim])
    return values.permute(order).contiguous().permute([order.index(dim) for dim in range(model.dim())])


def _whole(tensor: Tensor, dim: int, pieces: tuple[int, ...], group: TensorGroup) -> Tensor:
    rows = tensor.movedim(dim, 0).contiguous()
    slots = _slots(pieces, group.size)
    height = slots.size // group.size
    if len(rows) < height:  # the ranks' parts are of different sizes, and the message is not
        rows = torch.cat([rows, rows.new_zeros(height - len(rows), *rows.shape[1:])])
    everybody = torch.empty((slots.size, *rows.shape[1:]), dtype=rows.dtype, device=rows.device)
    torch_compat.all_gather_rows(everybody, rows, group.process_group)
    if slots.order is not None:
        everybody = everybody.index_select(0, slots.order.to(tensor.device))
    return everybody.movedim(0, dim).contiguous()  # a whole may meet code that has no rule, such as ``view``


def _part_of_sum(tensor: Tensor, dim: int, pieces: tuple[int, ...], group: TensorGroup) -> Tensor:
    rows = tensor.movedim(dim, 0).contiguous()
    slots = _slots(pieces, group.size)
    height = slots.size // group.size
    if slots.order is not None:
        ordered = rows.new_zeros(slots.size, *rows.shape[1:])
        rows = ordered.index_copy(0, slots.order.to(tensor.device), rows)
    mine = torch.empty((height, *rows.shape[1:]), dtype=rows.dtype, device=rows.device)
    torch_compat.reduce_scatter_rows(mine, rows, group.process_group)
    return laid_out_like(tensor, mine[: slots.rows[group.rank]].movedim(0, dim))


@dataclass(frozen=True, eq=False)
class _Slots:
    """How the rows of the whole lie in a message in which each rank has a slot of the same height.

    Attributes:
        size: rows of the message.
        rows: rows that each rank really has.
        order: the place of each row of the whole in the message; ``None`` where it is its own.
    """

    size: int
    rows: tuple[int, ...]
    order: Tensor | None


@lru_cache(maxsize=512)
def _slots(pieces: tuple[int, ...], size: int) -> _Slots:
    rows = [rows_of(rank, pieces, size) for rank in range(size)]
    height = max(len(mine) for mine in rows)
    counts = tuple(len(mine) for mine in rows)
    if len(pieces) == 1 and min(counts) == height:
        return _Slots(size * height, counts, None)
    order = torch.empty(sum(pieces), dtype=torch.long)
    for rank, mine in enumerate(rows):
        order[mine] = rank * height + torch.arange(len(mine))
    return _Slots(size * height, counts, order)
