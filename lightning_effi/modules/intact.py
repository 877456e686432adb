"""A module as it was before it was taken into parts, to be put back should that fail half-way.

Nothing is copied: what is kept are the objects, the tables that hold them, and the memory that parameters stood for. So
it makes no difference how far splitting and sharding have come, in whose code they failed, and whether other ranks
have. Until all has gone well no whole parameter is freed, so a rank needs at most what it held before, and its shards.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_effi.compat import fsdp as fsdp_compat

_TABLES = frozenset({"_parameters", "_buffers", "_modules"})


class IntactModule:
    """Classes, attributes, hooks, parameters and buffers of ``root`` and of all modules inside, as they are now.

    Values are those of the memory, which a message of the first rank may have made equal on all ranks meanwhile.
    """

    def __init__(self, root: nn.Module) -> None:
        self._modules = [_Module.of(module) for module in root.modules()]
        tensors = {id(tensor): tensor for tensor in (*root.parameters(), *root.buffers())}
        self._tensors = [_Tensor.of(tensor) for tensor in tensors.values()]

    @torch.no_grad()
    @torch.inference_mode(False)
    def put_back(self) -> None:
        """Undo whatever has been done to the module since; asks no other rank."""
        for kept in self._modules:
            kept.put_back()
        for tensor in self._tensors:
            tensor.put_back()


@dataclass(frozen=True)
class _Module:
    module: nn.Module
    kind: type
    is_sharded: bool
    attributes: dict[str, Any]
    tables: list[tuple[dict[Any, Any], dict[Any, Any]]]

    @classmethod
    def of(cls, module: nn.Module) -> _Module:
        held = vars(module)
        tables = [
            (table, dict(table))
            for name, table in held.items()
            if isinstance(table, dict) and (name in _TABLES or "_hooks" in name)
        ]
        return cls(module, type(module), fsdp_compat.is_known(module), dict(held), tables)

    def put_back(self) -> None:
        if not self.is_sharded:
            fsdp_compat.forget(self.module)
        self.module.__class__ = self.kind
        held = vars(self.module)
        for name in held.keys() - self.attributes.keys():
            del held[name]
        for name, value in self.attributes.items():
            if name not in held or held[name] is not value:
                held[name] = value
        for table, entries in self.tables:
            table.clear()
            table.update(entries)


@dataclass(frozen=True)
class _Tensor:
    tensor: Tensor
    kind: type
    memory: Tensor
    trainable: bool
    grad: Tensor | None
    attributes: dict[str, Any]

    @classmethod
    def of(cls, tensor: Tensor) -> _Tensor:
        grad = tensor.grad if tensor.is_leaf else None
        return cls(tensor, type(tensor), tensor.data, tensor.requires_grad, grad, dict(vars(tensor)))

    def put_back(self) -> None:
        tensor = self.tensor
        if type(tensor) is not self.kind:  # first of all, since a class may redirect what follows
            tensor.__class__ = self.kind
        vars(tensor).clear()
        vars(tensor).update(self.attributes)
        if not _is_same_memory(tensor, self.memory):
            tensor.data = self.memory
        if tensor.requires_grad != self.trainable:
            tensor.requires_grad_(self.trainable)
        if tensor.is_leaf and tensor.grad is not self.grad:
            tensor.grad = self.grad


def _is_same_memory(tensor: Tensor, memory: Tensor) -> bool:
    if (tensor.device, tensor.dtype, tensor.shape) != (memory.device, memory.dtype, memory.shape):
        return False
    return tensor.layout is torch.strided and tensor.data_ptr() == memory.data_ptr()
