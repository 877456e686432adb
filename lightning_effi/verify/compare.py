"""How far two sets of gradients or parameters are apart, in a measure that means something for each parameter.

For each parameter the distance is ``|a - b| / max(|b|, 1e-3 * |all of b|)``: relative to the parameter's own norm, but
not below a thousandth of the whole, since the true gradient of a key bias is zero and a bare ratio means nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

FLOOR = 1e-3


@dataclass(frozen=True)
class Comparison:
    """Distances by name. ``print(comparison)`` names the worst."""

    distances: dict[str, float]
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()

    @property
    def worst(self) -> tuple[str, float]:
        """The name with the largest distance (``nan`` counts as largest), and that distance."""
        if not self.distances:
            return "", 0.0
        return max(self.distances.items(), key=lambda item: float("inf") if item[1] != item[1] else item[1])

    def within(self, tolerance: float) -> bool:
        """Whether both sides hold the same names and no distance exceeds ``tolerance``."""
        return not self.missing and not self.unexpected and self.worst[1] <= tolerance

    def __str__(self) -> str:
        name, distance = self.worst
        lines = [f"largest distance {distance:.2e} at '{name}' of {len(self.distances)} compared"]
        if self.missing:
            lines.append(f"missing: {', '.join(self.missing)}")
        if self.unexpected:
            lines.append(f"unexpected: {', '.join(self.unexpected)}")
        return "; ".join(lines)


def compare_tensors(
    actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], scale: Mapping[str, Tensor] | None = None
) -> Comparison:
    """Distance of each tensor of ``actual`` from that of ``expected`` (plain tensors of equal shapes).

    Args:
        actual: what was computed.
        expected: what it should be.
        scale: tensors whose norms the distances are relative to (the length of an update step, say); ``expected``
            by default.
    """
    scale = expected if scale is None else scale
    common = [name for name in expected if name in actual]
    whole = torch.stack([_norm(scale[name]) for name in common]).norm() if common else torch.zeros(())
    floor = FLOOR * whole
    distances = {}
    for name in common:
        difference = _norm(actual[name].double() - expected[name].double())
        unit = torch.maximum(_norm(scale[name]), floor)
        distances[name] = 0.0 if difference == 0 else float(difference / unit)
    return Comparison(
        distances,
        missing=tuple(name for name in expected if name not in actual),
        unexpected=tuple(name for name in actual if name not in expected),
    )


def _norm(tensor: Tensor) -> Tensor:
    return tensor.detach().double().norm().cpu()
