"""Every parameter of a module once, with its names: tied parameters have more than one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class ParameterInfo:
    """What planning needs to know about a parameter; works for meta tensors and DTensors (global shape)."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    trainable: bool
    also_named: tuple[str, ...] = ()

    @property
    def numel(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def bytes(self) -> int:
        return self.numel * self.dtype.itemsize


def describe_parameters(root: nn.Module) -> list[ParameterInfo]:
    """The parameters of ``root`` in ``named_parameters()`` order."""
    names: dict[int, list[str]] = {}
    parameters: dict[int, nn.Parameter] = {}
    for name, parameter in root.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
        parameters[id(parameter)] = parameter
    return [
        ParameterInfo(first, tuple(p.shape), p.dtype, p.requires_grad, tuple(others))
        for p, (first, *others) in ((parameters[key], found) for key, found in names.items())
    ]
