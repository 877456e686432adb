"""The inputs that blocks really get: a step is run until each kind of block has been called once.

A step that is only run to look at its inputs must leave no trace: buffers, counters and randomness are put back, logs
are swallowed, and it is left by an exception as soon as nothing more is to be learned, so that it needs no backward.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from lightning_effi.modules import Block
from lightning_effi.modules.restore import restored, silent
from lightning_effi.modules.state_changes import undone_writes


@dataclass(frozen=True)
class BlockKind:
    """Blocks of one class with the same parameters, and what the first of them was called with."""

    blocks: tuple[Block, ...]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class _EverythingSeenError(BaseException):
    """Ends the step; no ``Exception``, so that the module's own handlers do not take it for an error."""


def capture_inputs(
    module: nn.Module, blocks: Sequence[Block], step: Callable[..., Any], args: Any, kwargs: Any
) -> list[BlockKind]:
    """Run ``step`` without gradients and return the kinds of blocks that it called, in that order."""
    kinds: dict[str, list[Block]] = {}
    for block in blocks:
        kinds.setdefault(_signature(block.module), []).append(block)
    seen: dict[str, tuple[Any, Any]] = {}

    def note(kind: str, _module: nn.Module, args: Any, kwargs: Any) -> None:
        if kind not in seen:
            seen[kind] = _copied((args, kwargs), module)
        if len(seen) == len(kinds):
            raise _EverythingSeenError

    handles = [
        block.module.register_forward_pre_hook(partial(note, kind), with_kwargs=True)
        for kind, members in kinds.items()
        for block in members
    ]
    trained = [(parameter, parameter.requires_grad) for parameter in module.parameters()]
    try:
        module.__dict__["manual_backward"] = _end  # there are no gradients here; what runs later is not looked at
        with (
            torch.inference_mode(False),
            torch.no_grad(),
            restored(module),
            silent(module),
            undone_writes(module),
            suppress(_EverythingSeenError),
        ):
            step(*copy.deepcopy(args), **copy.deepcopy(kwargs))
    finally:
        del module.__dict__["manual_backward"]
        for parameter, requires_grad in trained:  # a step that toggles optimizers is left while one is
            parameter.requires_grad_(requires_grad)
        for handle in handles:
            handle.remove()
    return [BlockKind(tuple(kinds[kind]), *found) for kind, found in seen.items()]


def _end(*_: Any, **__: Any) -> None:
    raise _EverythingSeenError


def _signature(block: nn.Module) -> str:
    shapes = [(name, tuple(p.shape), p.requires_grad) for name, p in block.named_parameters()]
    return f"{type(block).__qualname__} {shapes}"


def _copied(tree: Any, root: nn.Module) -> Any:
    copied = tree_map(lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, tree)
    # Caches and other objects that a block may change are copied, but no module that a block is handed: it may hold
    # blocks itself, which are being watched.
    return copy.deepcopy(copied, {id(module): module for module in root.modules()})
