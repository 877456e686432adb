"""Functions that order, add, drop and stretch dims: the split moves with its dim."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_effi.tensor_parallel.rules.sizes import bound, given_sizes
from lightning_effi.tensor_parallel.rules.wholes import run_on_wholes
from lightning_effi.tensor_parallel.split import (
    CannotSplitError,
    SplitTensor,
    whole_shape,
    wrap,
)

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


def transpose(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    tensor, a, b = bound(args, kwargs, ("dim0", "dim1"), (None, None))
    order = list(range(tensor.dim()))
    order[a], order[b] = order[b], order[a]
    return _permuted(tensor, order)


def last_two(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """``x.mT``, ``x.T`` and ``x.t()`` of a matrix."""
    return transpose(func, (args[0], -2, -1) if args[0].dim() > 1 else (args[0], 0, 0), {})


def permute(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    order = given_sizes(args[1:]) if len(args) > 1 else list(kwargs["dims"])
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
    tensor, dim = bound(args, kwargs, ("dim",), (None,))
    dim %= tensor.dim() + 1
    split = tensor.placement
    output = func(tensor, dim)
    return wrap(output, split if split.dim is None else split.at(split.dim + (dim <= split.dim)))


def squeeze(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    tensor, dim = bound(args, kwargs, ("dim",), (None,))
    split, shape = tensor.placement, whole_shape(tensor)
    chosen = range(len(shape)) if dim is None else [dim] if isinstance(dim, int) else dim
    dropped = sorted({d % len(shape) for d in chosen if shape[d] == 1})
    if split.dim in dropped:
        return run_on_wholes(func, args, kwargs)
    output = tensor.reshape([n for d, n in enumerate(tensor.shape) if d not in dropped])
    return wrap(output, split if split.dim is None else split.at(split.dim - sum(d < split.dim for d in dropped)))


def expand(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """``expand`` and ``expand_as``."""
    tensor = args[0]
    if not isinstance(tensor, SplitTensor):
        return tensor.expand(whole_shape(args[1]))
    sizes = list(whole_shape(args[1])) if isinstance(args[1], Tensor) else given_sizes(args[1:])
    split = tensor.placement
    if split.dim is None:
        return wrap(tensor.expand(sizes), split)
    dim = split.dim + len(sizes) - tensor.dim()
    sizes[dim] = -1
    return wrap(tensor.expand(sizes), split.at(dim))


def as_complex(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """``view_as_complex`` and ``view_as_real``, which drop and add a dim at the end."""
    tensor = args[0]
    if tensor.placement.dim == tensor.dim() - 1 and func.__name__ == "view_as_complex":
        raise CannotSplitError("view_as_complex joins the split dim", tensor.placement.sources)
    return wrap(func(tensor), tensor.placement)


RULES: dict[str, Any] = {
    "transpose": transpose, "swapaxes": transpose, "swapdims": transpose,
    "t": last_two, "T": last_two, "mT": last_two, "permute": permute, "movedim": movedim, "moveaxis": movedim,
    "unsqueeze": unsqueeze, "squeeze": squeeze, "expand": expand, "expand_as": expand,
    "view_as_complex": as_complex, "view_as_real": as_complex,
}  # fmt: skip
