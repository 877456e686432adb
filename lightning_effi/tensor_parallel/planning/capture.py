"""The inputs that blocks really get, noted in a run of the step that serves other ends too, or in one for them alone.

A step that is only run to look at its inputs must leave no trace: buffers, counters and randomness are put back, logs
are swallowed, and it is left by an exception as soon as nothing more is to be learned, so that it needs no backward.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
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


class BlockInputs:
    """What the first block of each kind is called with, in whatever run of the module is watched.

    Args:
        module: the user's.
        blocks: its blocks.
    """

    def __init__(self, module: nn.Module, blocks: Sequence[Block]) -> None:
        self._module = module
        self._members: dict[str, list[Block]] = {}
        for block in blocks:
            self._members.setdefault(_signature(block.module), []).append(block)
        self._seen: dict[str, tuple[Any, Any]] = {}

    @property
    def kinds(self) -> list[BlockKind]:
        """The kinds of blocks that were called, in that order."""
        return [BlockKind(tuple(self._members[kind]), *found) for kind, found in self._seen.items()]

    @contextmanager
    def watched(self, then_stop: bool = False) -> Iterator[None]:
        """Inside, calls of blocks are noted; ``then_stop`` leaves when every kind has been called."""

        def note(kind: str, _module: nn.Module, args: Any, kwargs: Any) -> None:
            if kind not in self._seen:
                self._seen[kind] = _copied((args, kwargs), self._module)
            if then_stop and len(self._seen) == len(self._members):
                raise _EverythingSeenError

        handles = [
            block.module.register_forward_pre_hook(partial(note, kind), with_kwargs=True)
            for kind, members in self._members.items()
            for block in members
        ]
        try:
            with suppress(_EverythingSeenError):
                yield
        finally:
            for handle in handles:
                handle.remove()

    def capture(self, step: Callable[..., Any], args: Any, kwargs: Any) -> None:
        """Run ``step`` without gradients, for its inputs alone."""
        module = self._module
        trained = [(parameter, parameter.requires_grad) for parameter in module.parameters()]
        try:
            module.__dict__["manual_backward"] = _end  # there are no gradients here; what runs later is not looked at
            with (
                torch.inference_mode(False),
                torch.no_grad(),
                restored(module),
                silent(module),
                undone_writes(module),
                self.watched(then_stop=True),
            ):
                step(*copy.deepcopy(args), **copy.deepcopy(kwargs))
        finally:
            del module.__dict__["manual_backward"]
            for parameter, requires_grad in trained:  # a step that toggles optimizers is left while one is
                parameter.requires_grad_(requires_grad)


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
