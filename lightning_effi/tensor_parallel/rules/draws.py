"""Functions that draw random numbers: every rank draws for the whole, from the common stream, and uses its part.

The generators of a group's ranks are equal and stay so, see :mod:`lightning_effi.tensor_parallel.randomness`. A draw
for the whole moves them on by as much as one process's generator, so that whatever a step draws afterwards is what one
process draws, and the parts are those of its masks. Functions whose draws depend on values (``bernoulli``, ``rrelu``)
have no rule: they run on gathered wholes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_effi.tensor_parallel.collectives import laid_out_like, take
from lightning_effi.tensor_parallel.rules.elementwise import elementwise
from lightning_effi.tensor_parallel.rules.wholes import run_on_wholes
from lightning_effi.tensor_parallel.split import Split, SplitTensor, whole_shape, wrap

Args = tuple[Any, ...]
Kwargs = dict[str, Any]

_FILLS = ("bernoulli_", "uniform_", "normal_", "random_", "exponential_", "geometric_", "cauchy_", "log_normal_")


def dropout(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """``F.dropout(input, p, training, inplace)`` and ``torch.dropout(input, p, train)``."""
    is_functional = func is F.dropout
    given = dict(zip(("input", "p", "training" if is_functional else "train", "inplace"), args, strict=False)) | kwargs
    tensor, p = given["input"], given.get("p", 0.5)
    training = given.get("training", True) if is_functional else given["train"]
    if not training or p == 0.0 or tensor.placement.dim is None:  # which draws nothing, or the same everywhere
        return elementwise(func, args, kwargs)
    noise = part_of_noise(tensor, tensor.placement, p)
    in_place = given.get("inplace", False) or func.__name__ == "dropout_"
    return elementwise(Tensor.mul_ if in_place else torch.mul, (tensor, noise), {})


def part_of_noise(tensor: Tensor, split: Split, p: float, dim: int | None = None) -> Tensor:
    """What a dropout of the whole multiplies this rank's part with: 0, or 1 / (1 - p).

    Args:
        tensor: this rank's part, or something of its shape.
        split: how the whole is split.
        p: probability of an element to be dropped.
        dim: which dim is split, where it is another one than that of ``split``.
    """
    dim = split.dim if dim is None else dim
    assert dim is not None
    shape = list(tensor.shape)
    shape[dim] = split.size
    with torch.no_grad():
        ones = laid_out_like(tensor, torch.ones(shape, dtype=tensor.dtype, device=tensor.device))
        noise = F.dropout(ones, p)
        return take(noise, dim, split.pieces, split.group)


def draw_alike(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """``torch.rand_like(x)`` and the like, which ask ``x`` for its shape."""
    tensor: SplitTensor = args[0] if args else kwargs["input"]
    rest = {key: value for key, value in kwargs.items() if key != "input"}
    return _part(func(_whole_like(tensor), *args[1:], **rest), tensor)


def fill(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """``x.uniform_()`` and the like, with numbers as parameters."""
    tensor, *rest = args
    if not isinstance(tensor, SplitTensor) or any(isinstance(value, Tensor) for value in (*rest, *kwargs.values())):
        return run_on_wholes(func, args, kwargs)
    with torch.no_grad():
        drawn = func(_whole_like(tensor), *rest, **kwargs)
    return elementwise(Tensor.copy_, (tensor, _part(drawn, tensor)), {})


def _whole_like(tensor: SplitTensor) -> Tensor:
    return laid_out_like(tensor, torch.empty(whole_shape(tensor), dtype=tensor.dtype, device=tensor.device))


def _part(whole: Tensor, like: SplitTensor) -> Tensor:
    """The part of ``whole`` that lies where this rank's part of ``like`` does."""
    split = like.placement
    if split.dim is None:
        return wrap(whole, split)
    return wrap(take(whole, split.dim, split.pieces, split.group), split.at(split.dim))


RULES: dict[str, Any] = (
    dict.fromkeys(["dropout", "dropout_"], dropout)
    | dict.fromkeys(["rand_like", "randn_like", "randint_like"], draw_alike)
    | dict.fromkeys(_FILLS, fill)
)
