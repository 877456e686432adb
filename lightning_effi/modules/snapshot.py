"""What a module holds besides its parameters, kept so that it can be put back into the very same objects.

Blocks and the module around them may share a list, a dict or a tensor. A copy in its place would part them without a
word, so lists, dicts, sets and tensors get their contents back, and attributes the objects that they had.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

# Attributes of nn.Module and LightningModule that a step does not keep state in.
NOT_STATE = frozenset({"_parameters", "_buffers", "_modules", "_trainer", "_fabric", "_metric_attributes"})


class Snapshot:
    """Attributes, buffers and containers of ``module`` and of all modules inside, as they are now."""

    def __init__(self, module: nn.Module) -> None:
        self._namespaces: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._contents: dict[int, tuple[Any, Any]] = {}
        for submodule in module.modules():
            for namespace in (vars(submodule), submodule._buffers):
                held = {key: value for key, value in namespace.items() if is_state(key)}
                self._namespaces.append((namespace, held))
                for value in held.values():
                    self._keep(value)

    def put_back(self) -> None:
        """Undo what has changed since."""
        for namespace, held in self._namespaces:
            for key in [key for key in namespace if is_state(key) and key not in held]:
                del namespace[key]
            for key, value in held.items():
                if namespace.get(key) is not value or key not in namespace:
                    namespace[key] = value
        for value, kept in self._contents.values():
            _put_contents_back(value, kept)

    def _keep(self, value: Any) -> None:
        if id(value) in self._contents:
            return
        if isinstance(value, Tensor):
            if not value.requires_grad and value.layout is torch.strided and not _is_expanded(value):
                self._contents[id(value)] = value, (value.detach(), value.detach().clone())
        elif isinstance(value, np.ndarray):
            self._contents[id(value)] = value, value.copy()
        elif isinstance(value, dict):
            self._contents[id(value)] = value, list(value.items())
            for item in list(value.values()):
                self._keep(item)
        elif isinstance(value, (list, set, deque)):
            self._contents[id(value)] = value, list(value)
            for item in list(value):
                self._keep(item)
        elif isinstance(value, tuple):
            for item in value:
                self._keep(item)


def is_state(key: str) -> bool:
    """Whether a step may keep something in the attribute of that name."""
    return key not in NOT_STATE and not key.endswith("_hooks")


def data_of(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """The attributes of ``module`` itself that are plain data: numbers, tensors, and nestings of them."""
    for key, value in vars(module).items():
        if is_state(key) and _is_data(value):
            yield key, value


def _put_contents_back(value: Any, kept: Any) -> None:
    """Only what has changed is written to, since some containers cannot be."""
    if isinstance(value, Tensor):
        _put_values_back(value, *kept)
    elif isinstance(value, np.ndarray):
        if value.shape == kept.shape and value.flags.writeable:
            np.copyto(value, kept)
    elif isinstance(value, dict):
        if not _same_items(_flat(value.items()), _flat(kept)):
            value.clear()
            for key, item in kept:
                value[key] = item
    elif not isinstance(value, set):
        if not _same_items(list(value), kept):
            value.clear()
            value.extend(kept)
    elif value != set(kept):
        value.clear()
        value.update(kept)


def _same_items(now: list[Any], kept: list[Any]) -> bool:
    return len(now) == len(kept) and all(a is b for a, b in zip(now, kept, strict=True))


def _flat(pairs: Iterable[tuple[Any, Any]]) -> list[Any]:
    return [item for pair in pairs for item in pair]


@torch.no_grad()
def _put_values_back(tensor: Tensor, memory: Tensor, values: Tensor) -> None:
    """``memory``: what the tensor was a name of before, should it have been resized or given another storage."""
    with torch.inference_mode(memory.is_inference()):
        memory.copy_(values)
        moved = tensor.shape != memory.shape or tensor.stride() != memory.stride()
        if moved or tensor.data_ptr() != memory.data_ptr():
            tensor.data = memory


def _is_expanded(tensor: Tensor) -> bool:
    """Of which one element stands in several places: nobody can write into it."""
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


def _is_data(value: Any) -> bool:
    if isinstance(value, (bool, int, float, complex, str, bytes)) or value is None:
        return True
    if isinstance(value, Tensor):
        return not value.requires_grad
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(_is_data(item) for item in value)
    if isinstance(value, dict):
        return all(_is_data(item) for pair in value.items() for item in pair)
    return False
