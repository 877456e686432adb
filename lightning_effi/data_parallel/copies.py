"""Copies of a sharded module, which are ordinary modules with whole parameters.

A callback or a hook that copies the module, or the Trainer with it, wants what it had under any other strategy: a
teacher, a snapshot. FSDP2 refuses to copy, and shards without what gathers them could not be used for anything.
"""

from __future__ import annotations

import copy
from collections.abc import Collection
from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_effi.compat import fsdp as fsdp_compat


class WholeCopies:
    """Lets ``copy.deepcopy`` of ``root``, and of any module below it, gather: all ranks must copy together.

    Args:
        root: a module whose parameters are sharded.
        added_names: attributes that sharding has put into modules, which copies do without.
        added_hooks: keys of hooks that sharding has registered.
    """

    def __init__(self, root: nn.Module, added_names: Collection[str], added_hooks: Collection[int]) -> None:
        self._names = {*added_names, "__deepcopy__"}
        self._hooks = set(added_hooks)
        self._modules = [m for m in root.modules() if m is root or fsdp_compat.is_involved(m)]
        for module in self._modules:
            if not hasattr(fsdp_compat.original_class(module), "__deepcopy__"):  # else the user knows better
                module.__dict__["__deepcopy__"] = partial(self._copy, module)

    def remove(self) -> None:
        """From here on, modules are copied as they were before."""
        for module in self._modules:
            module.__dict__.pop("__deepcopy__", None)

    def _copy(self, module: nn.Module, memo: dict[int, Any]) -> nn.Module:
        for parameter in module.parameters():
            if hasattr(parameter, "full_tensor") and id(parameter) not in memo:
                memo[id(parameter)] = _whole(parameter)
        kind: Any = fsdp_compat.original_class(module)
        copied: nn.Module = kind.__new__(kind)
        memo[id(module)] = copied
        state: Any = module.__reduce_ex__(4)[2]  # as copy.deepcopy reads it; a LightningModule leaves its Trainer out
        own = {name: self._without_hooks(value) for name, value in state.items() if name not in self._names}
        copied.__setstate__(copy.deepcopy(own, memo))
        return copied

    def _without_hooks(self, value: Any) -> Any:
        if isinstance(value, dict) and self._hooks & {key for key in value if isinstance(key, int)}:
            return type(value)((key, hook) for key, hook in value.items() if key not in self._hooks)
        return value


def _whole(parameter: Any) -> nn.Parameter:
    with torch.no_grad(), torch.inference_mode(False):
        return nn.Parameter(parameter.detach().full_tensor().clone(), parameter.requires_grad)
