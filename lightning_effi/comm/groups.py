"""Process groups of some ranks: a run makes them, and leaves them to further runs in the same processes."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

_made: weakref.WeakKeyDictionary[Any, dict[tuple[Any, ...], str | None]] = weakref.WeakKeyDictionary()  # by WORLD


def group_of(ranks: Sequence[int], timeout: timedelta) -> str | None:
    """Name of a process group of these global ranks; all ranks of the run must call this, in the same order.

    Returns:
        ``None`` on ranks that do not belong to it.
    """
    made = _made.setdefault(dist.group.WORLD, {})
    key = (*ranks, timeout)
    if key not in made:
        group = dist.new_group(list(ranks), timeout=timeout)
        made[key] = group.group_name if isinstance(group, dist.ProcessGroup) else None
    return made[key]
