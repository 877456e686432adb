"""Which settings of the precision plugin go together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from lightning_effi.precision.scaling import LossScaling

_LARGEST_FLOAT16 = torch.finfo(torch.float16).max


def low_precision(precision: str) -> torch.dtype | None:
    """The 16-bit dtype of a precision flag; ``None`` where there is none."""
    if precision.startswith("bf16"):
        return torch.bfloat16
    return torch.float16 if precision.startswith("16") else None


def scales_losses(precision: str, master_weights: bool) -> bool:
    """Gradients in fp16 cannot be divided by the scale without losing what it saved, so ``16-true`` has none."""
    return precision == "16-mixed" or (precision == "16-true" and master_weights)


def refuse_useless(
    precision: str, master_weights: bool, keep_fp32: Sequence[str], clamp_activations: Any, scaling: Sequence[str]
) -> None:
    """Raise ``ValueError`` for settings that do nothing together with ``precision``.

    ``scaling`` names the settings of the loss scale that differ from their defaults.
    """
    if master_weights and not precision.endswith("16-true"):
        raise ValueError(
            f"master_weights=True adds an fp32 copy to 'bf16-true' and '16-true'; with precision={precision!r} the"
            " parameters are not held in low precision: leave it out"
        )
    if scaling and not scales_losses(precision, master_weights):
        nearest = "set master_weights=True" if precision == "16-true" else "leave it out"
        raise ValueError(
            f"{', '.join(scaling)} only has an effect with 16-bit float and gradients in fp32 ('16-mixed', or"
            f" '16-true' with master_weights=True), and precision is {precision!r}: {nearest}"
        )
    if clamp_activations is not None:
        _check_clamp(precision, clamp_activations)
    if keep_fp32 and not precision.endswith("mixed") and not master_weights:
        raise ValueError(
            f"keep_fp32 needs parameters held in fp32, and precision={precision!r} has none, or only such: use"
            " 'bf16-mixed' or '16-mixed', or 'bf16-true' or '16-true' with master_weights=True"
        )


def _check_clamp(precision: str, clamp: Any) -> None:
    if low_precision(precision) != torch.float16:
        raise ValueError(
            f"clamp_activations only has an effect with 16-bit float, and precision is {precision!r}: leave it out"
        )
    if isinstance(clamp, bool) or not isinstance(clamp, (int, float)) or not 0 < clamp <= _LARGEST_FLOAT16:
        raise ValueError(
            f"clamp_activations must be a number between 0 and {_LARGEST_FLOAT16:.0f}, the largest that 16-bit float"
            f" holds, got {clamp!r}"
        )


def settings_of(scaler: Any) -> dict[str, Any]:
    """The settings of a ``torch.amp.GradScaler`` that a user gave to Lightning's own plugin."""
    if scaler is None or not scaler.is_enabled():
        return {}
    scale = scaler.get_scale()
    return {
        "init_scale": scale,
        "growth_factor": scaler.get_growth_factor(),
        "backoff_factor": scaler.get_backoff_factor(),
        "growth_interval": scaler.get_growth_interval(),
        "min_scale": min(scale, LossScaling.min_scale),
        "max_scale": max(scale, LossScaling.max_scale),
    }


def refuse_float16_parameters(module: nn.Module, precision: str) -> None:
    """Raise ``ValueError`` for trainable parameters whose gradients would be in fp16."""
    low = [name for name, p in module.named_parameters() if p.requires_grad and p.dtype == torch.float16]
    if low:
        raise ValueError(
            f"precision={precision!r} needs parameters in fp32, and '{low[0]}' is in fp16, whose gradients cannot be"
            " divided by the loss scale without loss. Build the module in fp32, or use precision='16-true'"
        )
