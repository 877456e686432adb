"""Functions that take tensors apart and join them: along the split dim, whole pieces of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_effi.tensor_parallel.collectives import take
from lightning_effi.tensor_parallel.rules.elementwise import elementwise, merged
from lightning_effi.tensor_parallel.rules.sizes import bound, given_sizes
from lightning_effi.tensor_parallel.rules.wholes import run_on_wholes
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
    tensor, dim = bound(args, kwargs, ("dim",), (-1,))
    first, second = split(torch.chunk, (tensor, 2, dim), {})
    return elementwise(torch.mul, (first, elementwise(torch.sigmoid, (second,), {})), {})


def unbind(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    tensor, dim = bound(args, kwargs, ("dim",), (0,))
    current, dim = tensor.placement, dim % tensor.dim()
    if dim == current.dim:
        return run_on_wholes(func, args, kwargs)
    parts = tensor.unbind(dim)
    return tuple(wrap(part, _without(current, dim)) for part in parts)


def iterate(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """``for part in x`` and ``a, b = x``."""
    return iter(unbind(func, (args[0], 0), {}))


def select(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    tensor, dim, index = bound(args, kwargs, ("dim", "index"), (None, None))
    current, dim = tensor.placement, dim % tensor.dim()
    if dim == current.dim:
        return run_on_wholes(func, args, kwargs)
    return wrap(tensor.select(dim, index), _without(current, dim))


def narrow(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    tensor, dim, start, extent = bound(args, kwargs, ("dim", "start", "length"), (None, None, None))
    index = [slice(None)] * tensor.dim()
    index[dim] = slice(start, start + extent)
    return getitem(func, (tensor, tuple(index)), {})


def getitem(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """Integers, slices, ``None`` and ``...``; an index tensor gathers."""
    tensor, index = args
    entries = index if isinstance(index, tuple) else (index,)
    if not isinstance(tensor, SplitTensor) or not all(_is_simple(entry) for entry in entries):
        return run_on_wholes(torch.Tensor.__getitem__, args, kwargs)
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


def join(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """``cat`` and ``stack``; ``cat`` along the split dim makes pieces of what it joins."""
    tensors, dim = bound(args, kwargs, ("dim",), (0,))
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
        return run_on_wholes(func, args, kwargs)
    fitted = [aligned(t, current, cut[0].dim() - current.dim) for t in tensors]
    return wrap(func(fitted, dim), current.at(current.dim + (stacked and dim <= current.dim)))


def pick(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """``gather`` along a dim that is not split; the indices are for all of the split dim."""
    tensor, dim, index = bound(args, kwargs, ("dim", "index"), (None, None))
    if not isinstance(tensor, SplitTensor) or tensor.placement.dim is None or len(args) + len(kwargs) > 3:
        return run_on_wholes(func, args, kwargs)
    current, dim = tensor.placement, dim % tensor.dim()
    assert current.dim is not None
    if isinstance(index, SplitTensor):
        fits = (index.placement.dim, index.placement.pieces) == (current.dim, current.pieces)
    else:
        fits = index.shape[current.dim] == current.size
    if dim == current.dim or not fits:
        return run_on_wholes(func, args, kwargs)
    return wrap(torch.gather(tensor, dim, aligned(index, current, tensor.dim() - current.dim)), current)


def pad(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """``F.pad`` of other dims than the split one."""
    tensor, widths = bound(args, kwargs, ("pad",), (None,))
    current = tensor.placement
    padded = {tensor.dim() - 1 - index // 2 for index, width in enumerate(widths) if width}
    if current.dim in padded:
        return run_on_wholes(func, args, kwargs)
    return wrap(func(*args, **kwargs), current)


def repeat(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """Along the split dim all of it is repeated: as many pieces again."""
    tensor, counts = args[0], given_sizes(args[1:]) if len(args) > 1 else list(kwargs["repeats"])
    current = tensor.placement
    output = tensor.repeat(counts)
    if current.dim is None:
        return wrap(output, current)
    dim = current.dim + len(counts) - tensor.dim()
    if counts[dim] > 1 and not current.is_even:
        raise CannotSplitError("parts of different sizes are repeated", current.sources)
    return wrap(output, current.at(dim, current.pieces * counts[dim]))


def repeat_interleave(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """By a number, along a dim; along the split dim each head is followed by its own copies."""
    tensor, repeats, dim = bound(args, {k: v for k, v in kwargs.items() if k != "output_size"},
                                  ("repeats", "dim"), (None, None))  # fmt: skip
    if not isinstance(tensor, SplitTensor) or not isinstance(repeats, int) or dim is None:
        return run_on_wholes(func, args, kwargs)
    split, dim = tensor.placement, dim % tensor.dim()
    if dim == split.dim and not split.is_even:
        return run_on_wholes(func, args, kwargs)
    output = tensor.repeat_interleave(repeats, dim)
    if split.dim is None:
        return wrap(output, split)
    pieces = tuple(n * repeats for n in split.pieces) if dim == split.dim else split.pieces
    return wrap(output, split.at(split.dim, pieces))


RULES: dict[str, Any] = {
    "split": split, "chunk": split, "tensor_split": split, "split_with_sizes": split, "unbind": unbind,
    "__iter__": iterate, "select": select, "narrow": narrow, "__getitem__": getitem, "glu": glu,
    "cat": join, "concat": join, "concatenate": join, "stack": join,
    "repeat_interleave": repeat_interleave, "pad": pad, "repeat": repeat, "gather": pick,
}  # fmt: skip
