"""Sharded scalars in ``torch.tensor([...])``, as Lightning's ``grad_norm`` and many logging hooks write it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_CONSTRUCTORS = (torch.tensor, torch.as_tensor)


class ReadableShards(TorchFunctionMode):
    """Inside, ``torch.tensor`` takes lists that hold sharded scalars; it would read memory that they do not have."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _CONSTRUCTORS and args and isinstance(args[0], (list, tuple)):
            args = (_numbers(args[0]), *args[1:])
        return func(*args, **(kwargs or {}))


def _numbers(values: Any) -> Any:
    if isinstance(values, (list, tuple)):
        return type(values)(_numbers(value) for value in values)
    if isinstance(values, Tensor) and hasattr(values, "device_mesh") and values.numel() == 1:
        return values.item()
    return values
