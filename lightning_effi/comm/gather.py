"""Whole values of what is sharded, one tensor at a time."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map


def gather_full(tree: Any, keep: bool) -> Any:
    """Replace every DTensor in ``tree`` by its full value on the CPU; all ranks must call this.

    One tensor is gathered at a time, so that the extra memory on a device is that of the largest one.

    Args:
        tree: nested dicts and lists.
        keep: whether this rank wants the result; the others only take part and return ``{}``.
    """
    from torch.distributed.tensor import DTensor

    def full(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        gathered = value.full_tensor() if isinstance(value, DTensor) else value
        return gathered.detach().cpu() if keep else None

    result = tree_map(full, tree)
    return result if keep else {}
