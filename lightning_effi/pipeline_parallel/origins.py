"""Where values come from: what torch functions make of tensors that only one stage knows is known to no other."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, resolve_name

from lightning_effi.modules.user_code import here
from lightning_effi.pipeline_parallel.tree import tree_leaves
from lightning_effi.sharded_tensors.names import is_in_place

Origin = TypeVar("Origin")

# What makes Python numbers of a tensor, and what decides by it.
READS = frozenset(
    getattr(Tensor, name)
    for name in ("item", "tolist", "numpy", "__array__", "__int__", "__float__", "__index__", "__complex__")
)
DECISIONS = frozenset(
    [Tensor.__bool__, Tensor.__contains__]
    + [getattr(kind, name) for kind in (torch, Tensor) for name in ("is_nonzero", "equal", "allclose")]
)
# A decision by these alone ends a run that has gone wrong, and nothing else.
_GUARDS = frozenset(getattr(kind, name) for kind in (torch, Tensor) for name in ("isnan", "isfinite", "isinf"))
_OF_GUARDS = _GUARDS | {
    getattr(kind, name)
    for kind in (torch, Tensor)
    for name in ("any", "all", "logical_not", "logical_or", "logical_and")
} | {Tensor.__invert__, Tensor.__or__, Tensor.__and__}  # fmt: skip
_TORCH = f"{Path(torch.__file__).parent}/"
_PACKAGE = f"{Path(__file__).parents[1]}/"


class Origins(Generic[Origin]):
    """What is known of each tensor as long as that lives, and of memory that was written into."""

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref[Tensor], Origin]] = {}
        self._written: dict[int, tuple[Tensor, Origin]] = {}

    def note(self, tensor: Tensor, origin: Origin) -> None:
        self._entries[id(tensor)] = weakref.ref(tensor), origin

    def note_write(self, tensor: Tensor, origin: Origin) -> None:
        """All names of the memory of ``tensor`` are meant."""
        self.note(tensor, origin)
        if tensor.layout is torch.strided:
            self._written[tensor.untyped_storage().data_ptr()] = tensor, origin

    def get(self, tensor: Tensor) -> Origin | None:
        entry = self._entries.get(id(tensor))
        if entry is not None and entry[0]() is tensor:
            return entry[1]
        if self._written and tensor.layout is torch.strided:
            written = self._written.get(tensor.untyped_storage().data_ptr())
            return None if written is None else written[1]
        return None


class StandInWatch(TorchFunctionMode):
    """Knows which tensors were made from stand-ins for other stages' values, so that nothing real is made of them.

    Code before a stage's own blocks works on stand-ins, and its results go nowhere. Whoever asks for a number gets NaN;
    a decision is an error, since it may have been another where the value is known.
    """

    def __init__(self) -> None:
        super().__init__()
        self._origins: Origins[tuple[str, bool]] = Origins()

    def mark(self, tree: Any, name: str) -> None:
        """All tensors of ``tree`` stand for what the block or unit ``name`` computes elsewhere."""
        for leaf in tree_leaves(tree):
            if isinstance(leaf, Tensor):
                self._origins.note(leaf, (name, False))

    def source(self, *values: Any) -> str | None:
        """The module that would have to run for ``values`` to be known here; ``None`` where they are."""
        found = self._found(tensors_in(values))
        return found[0][0] if found else None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = self._found(tensors_in((args, kwargs.values())))
        if not found:
            return func(*args, **kwargs)
        name = found[0][0]
        is_guard = guards(func, all(guard for _, guard in found))
        if func in READS:
            return _read(func, args, kwargs, name)
        if func in DECISIONS and not (all(guard for _, guard in found) or is_check_of_torch()):
            raise _unknown(name, f"decided by ({resolve_name(func) or func})")
        result = func(*args, **kwargs)
        for tensor in tensors_in((result,)):
            self._origins.note(tensor, (name, is_guard))
        if is_in_place(getattr(func, "__name__", "")) and args and isinstance(args[0], Tensor):
            self._origins.note_write(args[0], (name, is_guard))
        return result

    def _found(self, tensors: Iterator[Tensor]) -> list[tuple[str, bool]]:
        return [origin for tensor in tensors if (origin := self._origins.get(tensor)) is not None]


def tensors_in(values: Any) -> Iterator[Tensor]:
    """Those among the arguments of a torch function, which are tensors, or lists and dicts of some."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)
        elif isinstance(value, dict):
            yield from tensors_in(value.values())


def guards(func: Callable[..., Any], all_of_guards: bool) -> bool:
    """Whether the result of ``func`` only tells that values have gone wrong; ``all_of_guards``: its inputs do."""
    return func in _GUARDS or (func in _OF_GUARDS and all_of_guards)


def is_check_of_torch() -> bool:
    """Whether torch itself asks (a distribution that checks its arguments), and raises if it must."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None and frame.f_code.co_filename.startswith(_TORCH)


def _read(func: Any, args: Any, kwargs: Any, name: str) -> Any:
    tensor = args[0]
    if not tensor.is_floating_point():
        raise _unknown(name, f"read ({resolve_name(func) or func})")
    return func(torch.full_like(tensor.detach(), float("nan")), *args[1:], **kwargs)


def _unknown(name: str, what: str) -> RuntimeError:
    return RuntimeError(
        f"pipeline: a value that '{name}' computes on another stage is {what}{here()}, which the first batch did not"
        " do. Do so behind the last block, in a torch function, or use pipeline_parallel_size=1"
    )
