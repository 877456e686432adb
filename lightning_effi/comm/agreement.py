"""Small messages by which data-parallel ranks agree on what they are about to do.

They go over a CPU group of their own, so that on GPUs the host need not wait for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from lightning_effi.compat import torch as torch_compat


class Agreement:
    """Collective yes/no questions among the ranks of ``group`` (a group whose backend serves CPU tensors)."""

    def __init__(self, group: Any) -> None:
        self._name = group.group_name  # a process group that is held by somebody cannot be destroyed

    @property
    def _group(self) -> Any:
        return torch_compat.group_named(self._name)

    def any(self, flags: Sequence[bool]) -> list[bool]:
        """Element-wise "or" over the ranks; every rank passes the same number of flags."""
        bits = torch.tensor(flags, dtype=torch.uint8)
        dist.all_reduce(bits, dist.ReduceOp.MAX, group=self._group)
        return [bool(bit) for bit in bits.tolist()]

    def any_and_same(self, flags: Sequence[bool], fingerprint: int) -> tuple[list[bool], bool]:
        """:meth:`any`, and whether all ranks passed the same ``fingerprint`` (below 2**62), in one message."""
        values = torch.tensor([*map(int, flags), fingerprint, -fingerprint], dtype=torch.int64)
        dist.all_reduce(values, dist.ReduceOp.MAX, group=self._group)
        *bits, highest, negated_lowest = values.tolist()
        return [bool(bit) for bit in bits], highest == -negated_lowest

    def least(self, number: int) -> int:
        """The smallest ``number`` of all ranks."""
        value = torch.tensor(number)
        dist.all_reduce(value, dist.ReduceOp.MIN, group=self._group)
        return int(value)

    def gather(self, value: Any) -> list[Any]:
        """Everybody's ``value``, in rank order."""
        gathered: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(gathered, value, group=self._group)
        return gathered
