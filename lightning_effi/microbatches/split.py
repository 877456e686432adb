"""Cutting a batch into pieces by rows.

A batch is any nesting of mappings, lists, tuples, dataclasses and tensors. Its rows are counted by the first dim of
its tensors; what has another first dim is handed whole to every piece, and said so, never cut by accident.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Piece:
    """Rows ``start`` to ``stop`` of a batch."""

    data: Any
    start: int
    stop: int

    @property
    def rows(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Rows:
    """How many rows a batch has, and which of its tensors are not laid out by rows."""

    count: int
    whole: tuple[str, ...] = ()


def tensors(batch: Any) -> dict[str, Tensor]:
    """The tensors of ``batch`` by dotted name (``"meta.lengths"``, ``"0"``)."""
    return {name: leaf for name, leaf in _leaves(batch, "") if isinstance(leaf, Tensor)}


def shapes(batch: Any) -> Any:
    """What may decide the shapes of a computation on ``batch``: shapes and dtypes of its tensors, plain values, and of
    lists of texts, which differ in every batch, the lengths. Hashable.
    """
    if isinstance(batch, Tensor):
        return tuple(batch.shape), batch.dtype
    if _is_plain_list(batch) and all(isinstance(item, (str, bytes)) for item in batch):
        return type(batch), len(batch)
    if isinstance(batch, (list, tuple)) and not _children(batch):
        return type(batch), tuple(batch)
    if children := _children(batch):
        return type(batch), tuple((key, shapes(child)) for key, child in children)
    return batch if isinstance(batch, (bool, int, float, str, bytes, type(None))) else type(batch)


def count_rows(batch: Any) -> Rows:
    """Find the rows of a batch.

    Raises:
        ValueError: where no size or no single size can be the number of rows; names what was found.
    """
    sizes = {name: tensor.shape[0] for name, tensor in tensors(batch).items() if tensor.dim()}
    if not sizes:
        lists = {name: len(leaf) for name, leaf in _leaves(batch, "") if isinstance(leaf, (list, tuple))}
        if len(set(lists.values())) != 1:
            raise ValueError(f"{type(batch).__name__} holds no tensor and no list whose length is the number of rows")
        return Rows(next(iter(lists.values())))
    (rows, votes), *others = Counter(sizes.values()).most_common()
    if others and others[0][1] == votes:
        listing = ", ".join(f"'{name}' {size}" for name, size in sizes.items())
        raise ValueError(f"its tensors have different first dims, and none is that of most of them ({listing})")
    return Rows(rows, tuple(name for name, size in sizes.items() if size != rows))


def replaced(batch: Any, old: Tensor, new: Tensor) -> Any:
    """``batch`` with another tensor in the place of one of its own."""
    return _map(batch, lambda leaf: new if leaf is old else leaf)


def cut(batch: Any, rows: int, start: int, stop: int) -> Piece:
    """Rows ``start`` to ``stop`` of a batch of ``rows`` rows: of its tensors, and of lists with one item a row."""

    def narrow(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf[start:stop] if leaf.dim() and leaf.shape[0] == rows else leaf
        return leaf[start:stop] if isinstance(leaf, (list, tuple)) and len(leaf) == rows else leaf

    return Piece(_map(batch, narrow), start, stop)


def split(batch: Any, rows: int, count: int) -> list[Piece]:
    """Cut a batch into ``count`` pieces whose sizes differ by at most one row (never an empty one)."""
    count = max(1, min(count, rows))
    size, larger = divmod(rows, count)
    ends = [size * (i + 1) + min(i + 1, larger) for i in range(count)]
    return [cut(batch, rows, start, stop) for start, stop in zip([0, *ends], ends, strict=False)]


def _leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    for key, child in _children(value):
        yield from _leaves(child, f"{name}.{key}" if name else str(key))
    if _is_leaf(value):
        yield name, value


def _is_leaf(value: Any) -> bool:
    """Tensors, and lists of plain items (names, lengths), of which there may be one a row."""
    return isinstance(value, Tensor) or _is_plain_list(value)


def _is_plain_list(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and not any(_holds_tensors(item) for item in value)


def _holds_tensors(value: Any) -> bool:
    return isinstance(value, Tensor) or any(_holds_tensors(child) for _, child in _children(value))


def _children(value: Any) -> list[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, (list, tuple)):
        return [] if all(isinstance(item, (str, bytes, int, float)) for item in value) else list(enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    return []


def _map(value: Any, leaf: Callable[[Any], Any]) -> Any:
    """Rebuild ``value`` with ``leaf`` applied to its leaves; containers keep their types."""
    if _is_leaf(value):
        return leaf(value)
    if isinstance(value, MutableMapping):
        rebuilt = copy.copy(value)
        for key, child in value.items():
            rebuilt[key] = _map(child, leaf)
        return rebuilt
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_map(child, leaf) for child in value))
    if isinstance(value, (list, tuple)):
        return type(value)(_map(child, leaf) for child in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changed = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(changed, field.name, _map(getattr(value, field.name), leaf))
        return changed
    return value
