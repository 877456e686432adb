"""Random numbers that let a batch be compared with its pieces, and a module with its stages.

Drop path, noise levels and masks are drawn for the rows at hand, one after the other: pieces of a batch draw others
than the whole, and a stage that runs a part of the blocks draws others than the module. For a comparison, what is drawn
may therefore depend on nothing but its shape, and be the same for all rows (the first dim).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_effi.compat import torch as torch_compat
from lightning_effi.modules.restore import NoDropout

_UNIFORM = {"rand", "rand_like"}
_NORMAL = {"randn", "randn_like"}
_INTEGERS = {"randint", "randint_like"}
_IN_PLACE = {"uniform_", "normal_", "random_", "exponential_", "geometric_", "cauchy_", "log_normal_"}
_DRAWS = _UNIFORM | _NORMAL | _INTEGERS | _IN_PLACE | {"bernoulli", "bernoulli_"}


class SameForAllRows(NoDropout):
    """Inside there is no dropout, and torch's random functions give each row the same numbers."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        result = super().__torch_function__(func, types, args, kwargs)
        if not isinstance(result, Tensor) or torch_compat.fake_mode_of(result) is not None:
            return result
        self.changes |= name in _DRAWS
        if name in _UNIFORM:
            return _redraw(result, name, Tensor.uniform_)
        if name in _NORMAL:
            return _redraw(result, name, Tensor.normal_)
        if name in _INTEGERS:
            return _redraw(result, name, Tensor.random_, *_bounds(name, args, kwargs))
        if name in _IN_PLACE:
            kwargs.pop("generator", None)
            return _redraw(result, name, getattr(Tensor, name), *args[1:], **kwargs)
        if name in ("bernoulli", "bernoulli_"):
            rest = args[1:] if name == "bernoulli_" else args
            probability = rest[0] if rest else kwargs.get("p", 0.5)
            uniform = _redraw(torch.empty(result.shape, device=result.device), name, Tensor.uniform_)
            with torch.no_grad():
                return result.copy_(uniform < probability)
        return result


def _bounds(name: str, args: Any, kwargs: Any) -> tuple[int, int]:
    """Of ``randint([low], high, size)`` and ``randint_like(input, [low], high)``."""
    numbers = [a for a in (args[1:] if name == "randint_like" else args) if isinstance(a, int)]
    low = kwargs.get("low", numbers[0] if len(numbers) > 1 else 0)
    return int(low), int(kwargs["high"] if "high" in kwargs else numbers[-1])


@torch.no_grad()
def _redraw(result: Tensor, name: str, draw: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    row = result.new_empty((1, *result.shape[1:]) if result.dim() else ())
    seed = zlib.crc32(repr((name, tuple(row.shape[1:]))).encode())
    draw(row, *args, generator=torch.Generator(result.device).manual_seed(seed), **kwargs)
    return result.copy_(row.expand_as(result))
