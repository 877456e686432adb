"""Views of other sizes, which are given for the whole: where they put the split dim, and its pieces."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from lightning_effi.tensor_parallel.rules.elementwise import elementwise
from lightning_effi.tensor_parallel.rules.sizes import bound, given_sizes
from lightning_effi.tensor_parallel.split import (
    CannotSplitError,
    Split,
    SplitTensor,
    whole_shape,
    wrap,
)

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


def view(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """``view`` and ``reshape``; ``view(dtype)`` too."""
    tensor, *rest = args
    wanted: Any = rest[0] if rest else kwargs.get("shape", kwargs.get("size", kwargs.get("dtype")))
    if isinstance(wanted, torch.dtype):
        return elementwise(func, args, kwargs)
    return reshaped(tensor, given_sizes(rest) if rest else list(wanted))


def view_as(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """``view_as`` and ``reshape_as``."""
    if not isinstance(args[0], SplitTensor):
        return args[0].reshape(whole_shape(args[1]))
    return reshaped(args[0], list(whole_shape(args[1])))


def flatten(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    tensor, start, end = bound(args, kwargs, ("start_dim", "end_dim"), (0, -1))
    shape = whole_shape(tensor)
    start, end = start % len(shape), end % len(shape)
    return reshaped(tensor, [*shape[:start], math.prod(shape[start : end + 1]), *shape[end + 1 :]])


def unflatten(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    tensor, dim, sizes = bound(args, kwargs, ("dim", "sizes"), (None, None))
    shape = whole_shape(tensor)
    dim %= len(shape)
    sizes = list(sizes)
    if -1 in sizes:
        sizes[sizes.index(-1)] = shape[dim] // -math.prod(sizes)
    return reshaped(tensor, [*shape[:dim], *sizes, *shape[dim + 1 :]])


def reshaped(tensor: SplitTensor, sizes: list[int]) -> SplitTensor:
    """A view with the given sizes of the whole."""
    split, shape = tensor.placement, whole_shape(tensor)
    if -1 in sizes:
        sizes[sizes.index(-1)] = math.prod(shape) // -math.prod(sizes)
    if split.dim is None or sizes == list(shape):
        # autograd makes such views of what hooks return, whose placement has to stay
        return wrap(tensor.reshape(sizes if split.dim is None else tensor.shape), split)
    dim, pieces = _moved_split(split, shape, sizes)
    local = list(sizes)
    local[dim] = tensor.shape[split.dim] if pieces == split.pieces else sizes[dim] // split.group.size
    return wrap(tensor.reshape(local), split.at(dim, pieces))


def _moved_split(split: Split, shape: Sequence[int], sizes: Sequence[int]) -> tuple[int, tuple[int, ...]]:
    """Where a view puts the split: the dim of ``sizes``, and the pieces of that dim.

    In row-major order the split dim is (outer, inner), of which inner is split. ``before`` elements of higher order
    lie before inner; the dim of ``sizes`` in which inner begins is the one that reaches beyond ``before``.
    """
    assert split.dim is not None
    if not split.outer or not split.is_even:  # pieces of different sizes, or parts of such, only move as a whole
        return _moved_pieces(split, shape, sizes)
    before = math.prod(shape[: split.dim]) * split.outer
    reached, dim = 1, 0
    while reached * sizes[dim] <= before:
        reached *= sizes[dim]
        dim += 1
    # features become [1, features], which rows of one that come off other dims do not look like
    is_last = split.dim == len(shape) - 1 and dim == len(sizes) - 1 and sizes[dim] == split.size
    if is_last and dim and reached == before and sizes[dim - 1] == 1 and split.dim and shape[split.dim - 1] != 1:
        raise CannotSplitError(f"1 head is not divisible by tensor_parallel_size={split.group.size}", split.sources)
    outer, inner = before // reached, sizes[dim] // (before // reached)
    if before % reached or sizes[dim] % outer:
        raise CannotSplitError(f"view{tuple(shape)} → {tuple(sizes)} mixes the split dim with others", split.sources)
    # a whole multiple of the split dim stays split as it is; a part of it must be divisible by itself
    part = split.size // split.outer
    if inner % part and part % inner:
        raise CannotSplitError(f"view{tuple(shape)} → {tuple(sizes)} cuts across the split dim", split.sources)
    if inner % split.group.size:
        allowed = ", ".join(str(n) for n in range(2, inner + 1) if inner % n == 0)
        raise CannotSplitError(
            f"{inner} heads are not divisible by tensor_parallel_size={split.group.size}"
            + (f" ({allowed} would do)" if allowed else ""),
            split.sources,
        )
    return dim, (inner,) * outer


def _moved_pieces(split: Split, shape: Sequence[int], sizes: Sequence[int]) -> tuple[int, tuple[int, ...]]:
    assert split.dim is not None
    before, reached = math.prod(shape[: split.dim]), 1
    for dim, size in enumerate(sizes):
        if reached == before and size > 1:
            pieces = _rescaled(split.pieces, size)
            if size == split.size or (split.is_even and not any(piece % split.group.size for piece in pieces)):
                return dim, pieces
        reached *= size
    raise CannotSplitError(f"a view to {tuple(sizes)} takes packed pieces apart", split.sources)


def _rescaled(pieces: tuple[int, ...], size: int) -> tuple[int, ...]:
    """The pieces of a dim of ``size`` that is made of that of ``pieces`` by taking it apart or joining it with more.

    ``(1,)``, which no number of ranks divides, where it cuts across them.
    """
    total = sum(pieces)
    if size % total == 0:
        return tuple(piece * (size // total) for piece in pieces)
    unit = total // size
    return (1,) if total % size or any(piece % unit for piece in pieces) else tuple(piece // unit for piece in pieces)


RULES: dict[str, Any] = {
    "view": view, "reshape": view, "view_as": view_as, "reshape_as": view_as, "flatten": flatten,
    "unflatten": unflatten,
}  # fmt: skip
