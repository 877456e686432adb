"""Equal starting values on all data-parallel ranks.

Ranks that were not seeded alike would otherwise start from different weights and never notice.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from lightning_effi.compat import torch as torch_compat


def broadcast_states(tensors: Iterable[Tensor], group: Any) -> None:
    """Overwrite ``tensors`` with the values of the first rank of ``group``; a tensor given twice is sent once."""
    unique = {id(tensor): tensor.detach() for tensor in tensors if tensor.numel()}
    # the coalesced broadcast flattens, so a bucket must not mix dtypes
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in unique.values():
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    for tensors_of_dtype in by_dtype.values():
        # as rows, since a single tensor is copied as it lies in memory, where dims of one element have any stride
        sent = [tensor.reshape(-1) for tensor in tensors_of_dtype]
        torch_compat.broadcast_module_states(sent, group)
        for tensor, values in zip(tensors_of_dtype, sent, strict=True):
            if values.data_ptr() != tensor.data_ptr():
                tensor.copy_(values.view(tensor.shape))
