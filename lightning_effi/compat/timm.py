"""Private names of timm, each behind a function of our own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor


def clips_by_norm(optimizer: Any) -> bool:
    """Whether this optimizer clips by the norm over all its parameters in ``_get_clip_grad_norm`` (``Lamb``, 1.0)."""
    return hasattr(optimizer, "_get_clip_grad_norm") and "max_grad_norm" in optimizer.defaults


@contextmanager
def clip_norm_replaced(optimizer: Any, norm: Callable[[], Tensor]) -> Iterator[None]:
    """Inside, an optimizer that :func:`clips_by_norm` divides gradients by ``norm()``."""

    def divisor() -> Tensor | None:
        bound = optimizer.defaults["max_grad_norm"]
        return None if bound is None else (norm() / bound).clamp(min=1.0)

    optimizer._get_clip_grad_norm = divisor
    try:
        yield
    finally:
        del optimizer._get_clip_grad_norm


def compiles_for_plain_tensors(optimizer: Any) -> bool:
    """Whether this is ``timm.optim.Kron``, which compiles its products for parameters that are plain tensors."""
    return any(kind.__module__ == "timm.optim.kron" for kind in type(optimizer).__mro__)
