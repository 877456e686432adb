"""Exceptions for single modules: some compute in fp32, the outputs of some are bounded.

``forward`` is shadowed on the instance, as pipelines do, because they refuse modules with hooks. What takes its place
holds the bound method that it replaces, so that a deep copy of the module runs the copy's own. :func:`restore` puts the
method back.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from lightning_effi.modules import find_blocks, shared_parts


class _Instead:
    """In place of a module's ``forward``."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self.forward = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)


class _InFp32(_Instead):
    """Without autocast, on inputs in fp32; outputs are of ``dtype`` where the modules around expect one."""

    def __init__(self, forward: Callable[..., Any], device_type: str, dtype: torch.dtype | None) -> None:
        super().__init__(forward)
        self._device_type = device_type
        self._dtype = dtype

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = tree_map(_to(torch.float32), (args, kwargs))
        with torch.autocast(self._device_type, enabled=False):
            output = self.forward(*args, **kwargs)
        return output if self._dtype is None else tree_map(_to(self._dtype), output)


class _Clamped(_Instead):
    """Floating-point outputs stay within ``[-bound, bound]``, infinite ones included."""

    def __init__(self, forward: Callable[..., Any], bound: float) -> None:
        super().__init__(forward)
        self._bound = bound

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return tree_map(self._clamp, self.forward(*args, **kwargs))

    def _clamp(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        return value.clamp(-self._bound, self._bound)


def keep_in_fp32(root: nn.Module, patterns: Sequence[str], device_type: str, dtype: torch.dtype | None) -> None:
    """Let the modules whose names match one of ``patterns`` compute in fp32.

    Args:
        root: the LightningModule.
        patterns: ``fnmatch`` patterns over module names.
        device_type: whose autocast is switched off.
        dtype: of their outputs; ``None`` leaves them in fp32, for autocast to cast where it is needed.

    Raises:
        ValueError: for a pattern that no module's name matches.
    """
    names = [name for name, _ in root.named_modules() if name]
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            raise ValueError(
                f"keep_fp32: no module's name matches {pattern!r}. Names are those of {type(root).__name__}'s"
                f" named_modules(), such as {names[-1]!r}; '*' also matches dots"
            )
    for module in matching(root, patterns):
        module.__dict__["forward"] = _InFp32(module.forward, device_type, dtype)


def matching(root: nn.Module, patterns: Sequence[str]) -> list[nn.Module]:
    """The modules below ``root`` whose names match one of ``patterns``."""
    return [
        module
        for name, module in root.named_modules()
        if name and any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
    ]


def clamp_blocks(root: nn.Module, bound: float) -> None:
    """Bound the outputs of the repeated blocks of ``root``.

    Raises:
        ValueError: where there are none.
    """
    blocks = find_blocks(root)
    if not blocks:
        why = f" without shared parameters ({'; '.join(shared)})" if (shared := shared_parts(root)) else ""
        raise ValueError(
            f"clamp_activations={bound} bounds the outputs of repeated blocks, and {type(root).__name__} has none{why}:"
            " leave it out"
        )
    for block in blocks:
        module = root.get_submodule(block.name)
        module.__dict__["forward"] = _Clamped(module.forward, bound)


def restore(root: nn.Module) -> None:
    """Give every module its own ``forward`` back."""
    for module in root.modules():
        while isinstance(instead := module.__dict__.get("forward"), _Instead):
            del module.__dict__["forward"]
            if isinstance(instead.forward, _Instead) or module.forward != instead.forward:
                module.__dict__["forward"] = instead.forward


def _to(dtype: torch.dtype) -> Callable[[Any], Any]:
    def cast(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    return cast
