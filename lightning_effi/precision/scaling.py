"""The loss scale: how it moves. Plain numbers, without tensors or messages.

Gradients in 16-bit float vanish below 6e-8. Multiplying the loss lifts them into range; where the product leaves the
range at the upper end, the step is skipped and the factor shrinks (Micikevicius et al., arXiv:1710.03740).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from lightning_effi.config import check_positive

# A single odd batch may overflow at any scale; this many steps in a row are no accident.
PATIENCE = 5


@dataclass(frozen=True)
class LossScaling:
    """How the loss scale moves; with both factors 1 it stays where it is.

    Attributes:
        init_scale: first scale.
        growth_factor: factor by which the scale grows.
        backoff_factor: factor by which the scale shrinks.
        growth_interval: steps without overflow, one after the other, before the scale grows.
        hysteresis: overflows before the scale shrinks; counted anew when the scale has grown (as in Megatron-LM's
            ``DynamicGradScaler``).
        min_scale: smallest scale.
        max_scale: largest scale.

    Raises:
        ValueError: naming the setting, what it was given and what is allowed.
    """

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    hysteresis: int = 1
    min_scale: float = 1.0
    max_scale: float = 2.0**24

    def __post_init__(self) -> None:
        for name in ("init_scale", "growth_factor", "backoff_factor", "min_scale", "max_scale"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
                raise ValueError(f"{name} must be a positive number, got {value!r}")
        check_positive("growth_interval", self.growth_interval)
        check_positive("hysteresis", self.hysteresis)
        if self.growth_factor < 1:
            raise ValueError(f"growth_factor must be at least 1 (1: never grows), got {self.growth_factor}")
        if self.backoff_factor > 1:
            raise ValueError(f"backoff_factor must be at most 1 (1: never shrinks), got {self.backoff_factor}")
        if not self.min_scale <= self.init_scale <= self.max_scale:
            raise ValueError(
                f"init_scale={self.init_scale} must lie between min_scale={self.min_scale} and"
                f" max_scale={self.max_scale}"
            )

    @classmethod
    def changed(cls, values: Mapping[str, Any]) -> list[str]:
        """Names of those ``values`` that are not the defaults."""
        return [f.name for f in fields(cls) if values[f.name] != f.default]


class LossScaler:
    """The loss scale of a run: the same on every rank, since every rank tells it the same.

    Attributes:
        scale: what the next loss is multiplied with.
        skipped_steps: optimizer steps that were skipped so far.
    """

    def __init__(self, settings: LossScaling) -> None:
        self.settings = settings
        self.scale = float(settings.init_scale)
        self.skipped_steps = 0
        self._steps_since = 0  # the last change or overflow
        self._overflows_left = settings.hysteresis
        self._stuck_for = 0

    def update(self, overflowed: bool) -> None:
        """Move on after the gradients of one scale were used, or skipped because they ``overflowed``."""
        settings = self.settings
        if overflowed:
            self._stuck_for = 0 if self.can_shrink else self._stuck_for + 1
            self._steps_since = 0
            self._overflows_left -= 1
            if self._overflows_left <= 0:
                self.scale = self._shrunk
            return
        self._stuck_for = 0
        self._steps_since += 1
        if self._steps_since >= settings.growth_interval:
            self._steps_since = 0
            self._overflows_left = settings.hysteresis
            self.scale = min(self.scale * settings.growth_factor, settings.max_scale)

    @property
    def _shrunk(self) -> float:
        return max(self.scale * self.settings.backoff_factor, self.settings.min_scale)

    @property
    def can_shrink(self) -> bool:
        """Whether there is a smaller scale to try."""
        return self._shrunk < self.scale

    @property
    def is_stuck(self) -> bool:
        """Whether step after step overflows, and no smaller scale is left to try."""
        return self._stuck_for >= PATIENCE

    def state_dict(self) -> dict[str, Any]:
        """The state under the keys of ``torch.amp.GradScaler``, which can load it, and what that does not have."""
        return {
            "scale": self.scale,
            "growth_factor": self.settings.growth_factor,
            "backoff_factor": self.settings.backoff_factor,
            "growth_interval": self.settings.growth_interval,
            "_growth_tracker": self._steps_since,
            "overflows_left": self._overflows_left,
            "skipped_steps": self.skipped_steps,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a run stopped, one of stock Lightning included; factors and bounds are this run's own."""
        settings = self.settings
        self.scale = min(max(float(state["scale"]), settings.min_scale), settings.max_scale)
        self._steps_since = int(state["_growth_tracker"])
        self._overflows_left = min(int(state.get("overflows_left", settings.hysteresis)), settings.hysteresis)
        self.skipped_steps = int(state.get("skipped_steps", 0))
        self._stuck_for = 0
