"""What a device can do in low precision."""

from __future__ import annotations

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

# CUDA compute capabilities: fp16 arithmetic (5.3), tensor cores for fp16 (7.0) and for bf16 (8.0)
_ARITHMETIC = (5, 3)
_FAST = {torch.float16: (7, 0), torch.bfloat16: (8, 0)}
_FAST_ON_CPU = {
    torch.float16: ("amx_fp16", "avx512_fp16", "fp16_arith"),
    torch.bfloat16: ("amx_bf16", "avx512_bf16", "bf16"),
}


def refuse_without_float16(device: torch.device, precision: str) -> None:
    """Raise where 16-bit float is not there.

    Raises:
        ValueError: naming what to use in its place.
    """
    on_cuda = device.type == "cuda"
    if device.type not in ("cpu", "cuda") or (on_cuda and torch.cuda.get_device_capability(device) < _ARITHMETIC):
        raise ValueError(
            f"precision={precision!r} needs 16-bit float, which {device} does not have. Use precision='32-true'"
        )


def warn_if_slow(device: torch.device, dtype: torch.dtype, precision: str) -> None:
    """One line where low precision saves memory at best."""
    if not is_fast(device, dtype):
        rank_zero_warn(
            f"lightning_effi: this {device.type} device has no fast units for {str(dtype).removeprefix('torch.')}, so"
            f" precision={precision!r} may be slower than '32-true'",
            category=UserWarning,
        )


def is_fast(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether matrix products in ``dtype`` have units of their own; devices that are not known are trusted."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= _FAST[dtype]
    if device.type == "cpu":
        known = torch.cpu.get_capabilities()
        return any(known.get(unit, False) for unit in _FAST_ON_CPU[dtype])
    return True
