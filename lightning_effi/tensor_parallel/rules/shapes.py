"""Functions that rearrange: sizes are given for the whole and translated to this rank's part."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_effi.tensor_parallel.collectives import take
from lightning_effi.tensor_parallel.rules.elementwise import elementwise, merged
from lightning_effi.tensor_parallel.split import (
    CannotSplitError,
    Split,
    SplitTensor,
    aligned,
    split_tensors,
    whole_shape,
    wrap,
)

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


def size(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """``x.shape``, ``x.size()``, ``x.size(dim)``."""
    shape = whole_shape(args[0])
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    return shape if dim is None else shape[dim]


def numel(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> int:
    return math.prod(whole_shape(args[0]))


def length(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> int:
    return whole_shape(args[0])[0]


def new(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """``x.new_empty(...)`` and the like: split as ``x`` where the sizes are those of the whole, to be written to."""
    tensor, current = args[0], args[0].placement
    rest = args[1:] if func.__name__ != "new_full" else args[1:2]
    sizes = _sizes(rest) if rest else list(kwargs["size"])
    if current.dim is None or len(sizes) != tensor.dim() or sizes[current.dim] != current.size:
        return func(tensor.as_subclass(Tensor), *args[1:], **kwargs)
    sizes[current.dim] = tensor.shape[current.dim]
    behind = args[2:] if func.__name__ == "new_full" else ()
    given = {key: value for key, value in kwargs.items() if key != "size"}
    return wrap(func(tensor.as_subclass(Tensor), sizes, *behind, **given), current.at(current.dim))


# -- views -----------------------------------------------------------------------------------------------------------


def view(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """``view`` and ``reshape``; ``view(dtype)`` too."""
    tensor, *rest = args
    wanted: Any = rest[0] if rest else kwargs.get("shape", kwargs.get("size", kwargs.get("dtype")))
    if isinstance(wanted, torch.dtype):
        return elementwise(func, args, kwargs)
    return reshaped(tensor, _sizes(rest) if rest else list(wanted))


def view_as(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """``view_as`` and ``reshape_as``."""
    if not isinstance(args[0], SplitTensor):
        return args[0].reshape(whole_shape(args[1]))
    return reshaped(args[0], list(whole_shape(args[1])))


def flatten(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    tensor, start, end = _bound(args, kwargs, ("start_dim", "end_dim"), (0, -1))
    shape = whole_shape(tensor)
    start, end = start % len(shape), end % len(shape)
    return reshaped(tensor, [*shape[:start], math.prod(shape[start : end + 1]), *shape[end + 1 :]])


def unflatten(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    tensor, dim, sizes = _bound(args, kwargs, ("dim", "sizes"), (None, None))
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


# -- order of dims ---------------------------------------------------------------------------------------------------


def transpose(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    tensor, a, b = _bound(args, kwargs, ("dim0", "dim1"), (None, None))
    order = list(range(tensor.dim()))
    order[a], order[b] = order[b], order[a]
    return _permuted(tensor, order)


def last_two(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """``x.mT``, ``x.T`` and ``x.t()`` of a matrix."""
    return transpose(func, (args[0], -2, -1) if args[0].dim() > 1 else (args[0], 0, 0), {})


def permute(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    order = _sizes(args[1:]) if len(args) > 1 else list(kwargs["dims"])
    return _permuted(args[0], [dim % args[0].dim() for dim in order])


def movedim(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    tensor = args[0]
    marked = torch.empty(
        list(range(1, tensor.dim() + 1)), device="meta"
    )  # the size of each dim tells where it came from
    order = [extent - 1 for extent in torch.movedim(marked, *args[1:], **kwargs).shape]
    return _permuted(tensor, order)


def _permuted(tensor: SplitTensor, order: list[int]) -> SplitTensor:
    split = tensor.placement
    output = tensor.permute(order)
    return wrap(output, split if split.dim is None else split.at(order.index(split.dim)))


def unsqueeze(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    tensor, dim = _bound(args, kwargs, ("dim",), (None,))
    dim %= tensor.dim() + 1
    split = tensor.placement
    output = func(tensor, dim)
    return wrap(output, split if split.dim is None else split.at(split.dim + (dim <= split.dim)))


def squeeze(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    from lightning_effi.tensor_parallel.rules import fall_back

    tensor, dim = _bound(args, kwargs, ("dim",), (None,))
    split, shape = tensor.placement, whole_shape(tensor)
    chosen = range(len(shape)) if dim is None else [dim] if isinstance(dim, int) else dim
    dropped = sorted({d % len(shape) for d in chosen if shape[d] == 1})
    if split.dim in dropped:
        return fall_back(func, args, kwargs)
    output = tensor.reshape([n for d, n in enumerate(tensor.shape) if d not in dropped])
    return wrap(output, split if split.dim is None else split.at(split.dim - sum(d < split.dim for d in dropped)))


def expand(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """``expand`` and ``expand_as``."""
    tensor = args[0]
    if not isinstance(tensor, SplitTensor):
        return tensor.expand(whole_shape(args[1]))
    sizes = list(whole_shape(args[1])) if isinstance(args[1], Tensor) else _sizes(args[1:])
    split = tensor.placement
    if split.dim is None:
        return wrap(tensor.expand(sizes), split)
    dim = split.dim + len(sizes) - tensor.dim()
    sizes[dim] = -1
    return wrap(tensor.expand(sizes), split.at(dim))


def repeat_interleave(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """By a number, along a dim; along the split dim each head is followed by its own copies."""
    from lightning_effi.tensor_parallel.rules import fall_back

    tensor, repeats, dim = _bound(args, {k: v for k, v in kwargs.items() if k != "output_size"},
                                  ("repeats", "dim"), (None, None))  # fmt: skip
    if not isinstance(tensor, SplitTensor) or not isinstance(repeats, int) or dim is None:
        return fall_back(func, args, kwargs)
    split, dim = tensor.placement, dim % tensor.dim()
    if dim == split.dim and not split.is_even:
        return fall_back(func, args, kwargs)
    output = tensor.repeat_interleave(repeats, dim)
    if split.dim is None:
        return wrap(output, split)
    pieces = tuple(n * repeats for n in split.pieces) if dim == split.dim else split.pieces
    return wrap(output, split.at(split.dim, pieces))


def as_complex(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """``view_as_complex`` and ``view_as_real``, which drop and add a dim at the end."""
    tensor = args[0]
    if tensor.placement.dim == tensor.dim() - 1 and func.__name__ == "view_as_complex":
        raise CannotSplitError("view_as_complex joins the split dim", tensor.placement.sources)
    return wrap(func(tensor), tensor.placement)


def pad(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """``F.pad`` of other dims than the split one."""
    from lightning_effi.tensor_parallel.rules import fall_back

    tensor, widths = _bound(args, kwargs, ("pad",), (None,))
    current = tensor.placement
    padded = {tensor.dim() - 1 - index // 2 for index, width in enumerate(widths) if width}
    if current.dim in padded:
        return fall_back(func, args, kwargs)
    return wrap(func(*args, **kwargs), current)


def repeat(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """Along the split dim all of it is repeated: as many pieces again."""
    tensor, counts = args[0], _sizes(args[1:]) if len(args) > 1 else list(kwargs["repeats"])
    current = tensor.placement
    output = tensor.repeat(counts)
    if current.dim is None:
        return wrap(output, current)
    dim = current.dim + len(counts) - tensor.dim()
    if counts[dim] > 1 and not current.is_even:
        raise CannotSplitError("parts of different sizes are repeated", current.sources)
    return wrap(output, current.at(dim, current.pieces * counts[dim]))


def pick(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """``gather`` along a dim that is not split; the indices are for all of the split dim."""
    from lightning_effi.tensor_parallel.rules import fall_back

    tensor, dim, index = _bound(args, kwargs, ("dim", "index"), (None, None))
    if not isinstance(tensor, SplitTensor) or tensor.placement.dim is None or len(args) + len(kwargs) > 3:
        return fall_back(func, args, kwargs)
    current, dim = tensor.placement, dim % tensor.dim()
    assert current.dim is not None
    if isinstance(index, SplitTensor):
        fits = (index.placement.dim, index.placement.pieces) == (current.dim, current.pieces)
    else:
        fits = index.shape[current.dim] == current.size
    if dim == current.dim or not fits:
        return fall_back(func, args, kwargs)
    return wrap(torch.gather(tensor, dim, aligned(index, current, tensor.dim() - current.dim)), current)


# -- pieces ----------------------------------------------------------------------------------------------------------


def split(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """``split``, ``chunk``, ``tensor_split`` by a number and ``split_with_sizes``."""
    name = func.__name__
    keys = {"chunk": "chunks", "tensor_split": "indices_or_sections"}
    given = kwargs.get("split_size", kwargs.get("split_size_or_sections", kwargs.get("split_sizes")))
    tensor = args[0]
    how = args[1] if len(args) > 1 else kwargs.get(keys.get(name, ""), given)
    dim = (args[2] if len(args) > 2 else kwargs.get("dim", 0)) % tensor.dim()
    whole = torch.empty(whole_shape(tensor), device="meta")
    lengths = [part.shape[dim] for part in getattr(torch, name)(whole, how, dim)]
    current: Split = tensor.placement
    if current.dim is None or dim != current.dim:
        return tuple(wrap(part, current) for part in tensor.split(lengths, dim))
    if len(lengths) == 1:
        return (wrap(tensor.view(tensor.shape), current),)
    taken = _whole_pieces(current, lengths) if current.is_even else None
    if taken is None:
        raise CannotSplitError(
            f"{name} cuts the output into {lengths}, which are not its pieces {list(current.pieces)}", current.sources
        )
    parts = tensor.split([n // current.group.size for n in lengths], dim)
    return tuple(wrap(part, current.at(dim, pieces)) for part, pieces in zip(parts, taken, strict=True))


def glu(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """``F.glu``: the first half, gated by the second."""
    tensor, dim = _bound(args, kwargs, ("dim",), (-1,))
    first, second = split(torch.chunk, (tensor, 2, dim), {})
    return elementwise(torch.mul, (first, elementwise(torch.sigmoid, (second,), {})), {})


def unbind(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    from lightning_effi.tensor_parallel.rules import fall_back

    tensor, dim = _bound(args, kwargs, ("dim",), (0,))
    current, dim = tensor.placement, dim % tensor.dim()
    if dim == current.dim:
        return fall_back(func, args, kwargs)
    parts = tensor.unbind(dim)
    return tuple(wrap(part, _without(current, dim)) for part in parts)


def iterate(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """``for part in x`` and ``a, b = x``."""
    return iter(unbind(func, (args[0], 0), {}))


def select(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    from lightning_effi.tensor_parallel.rules import fall_back

    tensor, dim, index = _bound(args, kwargs, ("dim", "index"), (None, None))
    current, dim = tensor.placement, dim % tensor.dim()
    if dim == current.dim:
        return fall_back(func, args, kwargs)
    return wrap(tensor.select(dim, index), _without(current, dim))


def narrow(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    tensor, dim, start, extent = _bound(args, kwargs, ("dim", "start", "length"), (None, None, None))
    index = [slice(None)] * tensor.dim()
    index[dim] = slice(start, start + extent)
    return getitem(func, (tensor, tuple(index)), {})


def getitem(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """Integers, slices, ``None`` and ``...``; an index tensor gathers."""
    tensor, index = args
    entries = index if isinstance(index, tuple) else (index,)
    if not isinstance(tensor, SplitTensor) or not all(_is_simple(entry) for entry in entries):
        from lightning_effi.tensor_parallel.rules import fall_back

        return fall_back(torch.Tensor.__getitem__, args, kwargs)
    current = tensor.placement
    if current.dim is None:
        return wrap(tensor[index], current)
    local: list[Any] = []
    source = target = 0
    place, pieces = current.dim, current.pieces
    for entry in _without_ellipsis(entries, tensor.dim()):
        if entry is None:
            target += 1
        else:
            if source == current.dim:
                place = target
                entry, pieces = _cut(entry, current)
            source += 1
            target += not isinstance(entry, int)
        local.append(entry)
    if source <= current.dim:
        place = target + current.dim - source
    return wrap(tensor[tuple(local)], current.at(place, pieces))


def _cut(entry: Any, split: Split) -> tuple[slice, tuple[int, ...]]:
    """A slice of the split dim that takes whole pieces, for this rank's part."""
    if isinstance(entry, slice):
        start, stop, step = entry.indices(split.size)
        if (start, stop, step) == (0, split.size, 1):
            return slice(None), split.pieces
        lengths = [n for n in (start, stop - start, split.size - stop) if n]
        taken = _whole_pieces(split, lengths)
        if step == 1 and stop > start and taken is not None and split.is_even:
            n = split.group.size
            return slice(start // n, stop // n), taken[1 if start else 0]
    raise CannotSplitError(
        f"[{entry}] takes a part of the split dim that is not one of its pieces {list(split.pieces)}", split.sources
    )


def _whole_pieces(split: Split, lengths: Sequence[int]) -> list[tuple[int, ...]] | None:
    """The pieces that each of ``lengths`` consists of, or ``None`` where one ends inside a piece."""
    taken, rest = [], list(split.pieces)
    for extent in lengths:
        mine: list[int] = []
        while rest and sum(mine) < extent:
            mine.append(rest.pop(0))
        if sum(mine) != extent:
            return None
        taken.append(tuple(mine))
    return taken


def _is_simple(entry: Any) -> bool:
    return entry is None or entry is Ellipsis or isinstance(entry, slice) or type(entry) is int


def _without_ellipsis(entries: tuple[Any, ...], dims: int) -> list[Any]:
    named = sum(entry is not None and entry is not Ellipsis for entry in entries)
    result: list[Any] = []
    for entry in entries:
        result.extend([slice(None)] * (dims - named) if entry is Ellipsis else [entry])
    return result


def _without(split: Split, dim: int) -> Split:
    return split if split.dim is None else split.at(split.dim - (dim < split.dim))


# -- joining ---------------------------------------------------------------------------------------------------------


def join(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """``cat`` and ``stack``; ``cat`` along the split dim makes pieces of what it joins."""
    from lightning_effi.tensor_parallel.rules import fall_back

    tensors, dim = _bound(args, kwargs, ("dim",), (0,))
    stacked = func.__name__ == "stack"
    operands = split_tensors(tensors)
    cut = [t for t in operands if t.placement.dim is not None]
    if not cut:
        return wrap(func(tensors, dim), operands[0].placement)
    current = merged(cut)
    assert current.dim is not None
    dim %= cut[0].dim() + stacked
    if not stacked and all(t.placement.dim == dim and t.placement.is_even for t in cut):
        pieces = [t.placement.pieces if isinstance(t, SplitTensor) and t.placement.dim is not None else (t.shape[dim],)
                  for t in tensors]  # fmt: skip
        if not any(n % current.group.size for piece in pieces for n in piece):
            parts = [t if isinstance(t, SplitTensor) and t.placement.dim is not None
                     else take(t.as_subclass(Tensor), dim, piece, current.group)
                     for t, piece in zip(tensors, pieces, strict=True)]  # fmt: skip
            return wrap(func(parts, dim), current.at(dim, tuple(n for piece in pieces for n in piece)))
    if (not stacked and dim == current.dim) or any(
        (t.placement.dim, t.placement.pieces) != (current.dim, current.pieces) for t in cut
    ):
        return fall_back(func, args, kwargs)
    fitted = [aligned(t, current, cut[0].dim() - current.dim) for t in tensors]
    return wrap(func(fitted, dim), current.at(current.dim + (stacked and dim <= current.dim)))


def _sizes(rest: Sequence[Any]) -> list[int]:
    """Sizes given one by one or as a sequence."""
    return list(rest[0]) if len(rest) == 1 and not isinstance(rest[0], int) else list(rest)


def _bound(args: Args, kwargs: Kwargs, names: Sequence[str], defaults: Sequence[Any]) -> list[Any]:
    """The first argument, then those of ``names`` from wherever they were given."""
    values = list(args[1:])
    for name, default in list(zip(names, defaults, strict=True))[len(values) :]:
        values.append(kwargs.get(name, default))
    return [args[0] if args else kwargs.get("input", kwargs.get("tensors")), *values]


RULES: dict[str, Any] = {
    "size": size, "numel": numel, "nelement": numel, "__len__": length,
    "view": view, "reshape": view, "view_as": view_as, "reshape_as": view_as, "flatten": flatten,
    "unflatten": unflatten, "transpose": transpose, "swapaxes": transpose, "swapdims": transpose,
    "t": last_two, "T": last_two, "mT": last_two, "permute": permute, "movedim": movedim, "moveaxis": movedim,
    "unsqueeze": unsqueeze, "squeeze": squeeze, "expand": expand, "expand_as": expand,
    "repeat_interleave": repeat_interleave, "view_as_complex": as_complex, "view_as_real": as_complex,
    "split": split, "chunk": split, "tensor_split": split, "split_with_sizes": split, "unbind": unbind,
    "__iter__": iterate, "select": select, "narrow": narrow, "__getitem__": getitem,
    "new_empty": new, "new_zeros": new, "new_ones": new, "new_full": new,
    "pad": pad, "repeat": repeat, "gather": pick, "glu": glu,
    "cat": join, "concat": join, "concatenate": join, "stack": join,
}  # fmt: skip
