"""Trees of values as blocks are given and return them: PyTorch's pytrees, and dataclasses that hold tensors."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree


@dataclass(frozen=True)
class Spec:
    """How leaves make up a tree; ``opened`` are those leaves of the pytree that are dataclasses, by position."""

    tree: Any
    opened: tuple[tuple[int, Any, tuple[str, ...], Spec], ...] = ()

    def without_tensors(self) -> Spec:
        """One that holds no values of the tree that it describes, and can be sent."""
        opened = []
        for index, value, names, inner in self.opened:
            shell = copy.copy(value)
            for name in names:
                object.__setattr__(shell, name, None)
            opened.append((index, shell, names, inner.without_tensors()))
        return Spec(self.tree, tuple(opened))

    def __str__(self) -> str:
        inside = [f"{index}: {type(value).__name__}{names} {spec}" for index, value, names, spec in self.opened]
        return f"{self.tree} {'; '.join(inside)}"


def tree_flatten(tree: Any) -> tuple[list[Any], Spec]:
    """The leaves, and what :func:`tree_unflatten` needs to put others in their places."""
    outer, tree_spec = pytree.tree_flatten(tree)
    leaves: list[Any] = []
    opened = []
    for index, leaf in enumerate(outer):
        if not _holds_tensors(leaf):
            leaves.append(leaf)
            continue
        names = tuple(field.name for field in dataclasses.fields(leaf) if hasattr(leaf, field.name))
        inner, spec = tree_flatten([getattr(leaf, name) for name in names])
        opened.append((index, leaf, names, spec))
        leaves += inner
    return leaves, Spec(tree_spec, tuple(opened))


def tree_unflatten(leaves: list[Any], spec: Spec) -> Any:
    remaining = iter(leaves)
    outer = []
    opened = {index: rest for index, *rest in spec.opened}
    for index in range(spec.tree.num_leaves):
        if index not in opened:
            outer.append(next(remaining))
            continue
        value, names, inner = opened[index]
        fields = tree_unflatten([next(remaining) for _ in range(_count(inner))], inner)
        result = copy.copy(value)
        for name, field in zip(names, fields, strict=True):
            object.__setattr__(result, name, field)  # frozen ones, too
        outer.append(result)
    return pytree.tree_unflatten(outer, spec.tree)


def tree_leaves(tree: Any) -> list[Any]:
    return tree_flatten(tree)[0]


def tree_map(function: Callable[[Any], Any], tree: Any) -> Any:
    leaves, spec = tree_flatten(tree)
    return tree_unflatten([function(leaf) for leaf in leaves], spec)


def _count(spec: Spec) -> int:
    return int(spec.tree.num_leaves) - len(spec.opened) + sum(_count(inner) for *_, inner in spec.opened)


def _holds_tensors(leaf: Any) -> bool:
    """A dataclass without tensors is a plain value (settings), and handed on as it is."""
    if not dataclasses.is_dataclass(leaf) or isinstance(leaf, type):
        return False
    values = (getattr(leaf, field.name, None) for field in dataclasses.fields(leaf))
    return any(isinstance(inner, Tensor) for value in values for inner in tree_leaves(value))
