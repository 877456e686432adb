"""Buffers that training changes (BatchNorm statistics, centres, queues) follow the first data-parallel rank.

DistributedDataParallel sends all buffers before every forward. Here only those are sent that changed since the last
time on any rank, so that constant masks and rotary tables cost nothing.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from lightning_effi.comm.broadcast import broadcast_states
from lightning_effi.compat import torch as torch_compat


class BufferSync:
    """Tracks the buffers of ``module`` and sends the changed ones over ``group``."""

    def __init__(self, module: nn.Module, group: Any) -> None:
        self._module = module
        self._group_name = group.group_name
        # BatchNorm's kernel writes its running statistics without touching their version counters
        self._silent = {
            f"{name}.{key}" if name else key
            for name, submodule in module.named_modules()
            if isinstance(submodule, _NormBase)
            for key in submodule._buffers
        }
        self._seen = self._stamps()

    def changed(self) -> dict[str, bool]:
        """For each buffer, whether it may have changed on this rank since the last :meth:`send`."""
        current = self._stamps()
        training = self._module.training
        return {
            name: stamp != self._seen.get(name) or (training and name in self._silent)
            for name, stamp in current.items()
        }

    def send(self, which: Collection[str] | None = None) -> None:
        """Send the chosen buffers (all of them by default) from the first rank to the others."""
        buffers = self._buffers()
        chosen = [buffer for name, buffer in buffers.items() if which is None or name in which]
        if chosen:
            broadcast_states(chosen, torch_compat.group_named(self._group_name))
        known = buffers.keys() if which is None else {*self._seen, *which}  # others are new: not sent yet
        self._seen = {name: stamp for name, stamp in self._stamps().items() if name in known}

    def _buffers(self) -> dict[str, Tensor]:
        return dict(self._module.named_buffers())

    def _stamps(self) -> dict[str, tuple[int, int]]:
        return {
            name: (id(buffer), 0 if buffer.is_inference() else buffer._version)
            for name, buffer in self._buffers().items()
        }
