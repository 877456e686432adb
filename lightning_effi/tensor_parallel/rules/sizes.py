"""What is asked about sizes, and how sizes are given: for the whole, translated to this rank's part."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from lightning_effi.tensor_parallel.split import (
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
    sizes = given_sizes(rest) if rest else list(kwargs["size"])
    if current.dim is None or len(sizes) != tensor.dim() or sizes[current.dim] != current.size:
        return func(tensor.as_subclass(Tensor), *args[1:], **kwargs)
    sizes[current.dim] = tensor.shape[current.dim]
    behind = args[2:] if func.__name__ == "new_full" else ()
    given = {key: value for key, value in kwargs.items() if key != "size"}
    return wrap(func(tensor.as_subclass(Tensor), sizes, *behind, **given), current.at(current.dim))


def given_sizes(rest: Sequence[Any]) -> list[int]:
    """Sizes given one by one or as a sequence."""
    return list(rest[0]) if len(rest) == 1 and not isinstance(rest[0], int) else list(rest)


def bound(args: Args, kwargs: Kwargs, names: Sequence[str], defaults: Sequence[Any]) -> list[Any]:
    """The first argument, then those of ``names`` from wherever they were given."""
    values = list(args[1:])
    for name, default in list(zip(names, defaults, strict=True))[len(values) :]:
        values.append(kwargs.get(name, default))
    return [args[0] if args else kwargs.get("input", kwargs.get("tensors")), *values]


RULES: dict[str, Any] = {
    "size": size, "numel": numel, "nelement": numel, "__len__": length,
    "new_empty": new, "new_zeros": new, "new_ones": new, "new_full": new,
}  # fmt: skip
