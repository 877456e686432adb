"""Every parameter of a module once, with its names: tied parameters have more than one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class ParameterInfo:
    """What planning needs to know about a parameter; works for meta tensors and DTensors (global shape).

    ``parts``: into how many equal parts tensor parallelism has cut it; a rank holds one.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    trainable: bool
    also_named: tuple[str, ...] = ()
    parts: int = 1

    @property
    def numel(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def bytes(self) -> int:
        """Bytes of the part that a rank holds."""
        return self.numel * self.dtype.itemsize // self.parts


def describe_parameters(root: nn.Module) -> list[ParameterInfo]:
    """The parameters of ``root`` in ``named_parameters()`` order."""
    names: dict[int, list[str]] = {}
    parameters: dict[int, nn.Parameter] = {}
    for name, parameter in root.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
        parameters[id(parameter)] = parameter
    return [
        ParameterInfo(first, tuple(p.shape), p.dtype, p.requires_grad, tuple(others), _parts(p))
        for p, (first, *others) in ((parameters[key], found) for key, found in names.items())
    ]


def parameter_places(root: nn.Module) -> dict[int, list[tuple[nn.Module, str, str]]]:
    """By the ``id`` of each parameter: which modules hold it, its name there, and its whole name."""
    places: dict[int, list[tuple[nn.Module, str, str]]] = {}
    for prefix, module in root.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                places.setdefault(id(parameter), []).append((module, name, f"{prefix}.{name}" if prefix else name))
    return places


def _parts(parameter: Any) -> int:
    mesh = getattr(parameter, "device_mesh", None)
    return 1 if mesh is None or mesh.mesh_dim_names != ("tp",) else mesh.size()


def attributes(parameter: Tensor) -> dict[str, Any]:
    """What user code noted on a parameter (a learning-rate factor, say)."""
    return {key: value for key, value in parameter.__dict__.items() if not key.startswith("_")}
