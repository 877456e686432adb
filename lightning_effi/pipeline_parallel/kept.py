"""Tensors that blocks and units leave in attributes of their own, as a router leaves the loss of its balance.

A step may read them after the call (``sum(block.aux_loss for block in blocks)``), so they are outputs as much as what
is returned. A stage that does not run the module would find what another run left there: values of an old batch, and
no graph. Stand-ins take their place, and the observed run sees who reads them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from lightning_effi.pipeline_parallel.tree import tree_leaves

Place = tuple[nn.Module, str]
Held = dict[Place, tuple[Any, list[Tensor]]]
_MISSING = object()
_NOT_OUTPUTS = frozenset({"_parameters", "_buffers", "_modules"})


class KeptTensors:
    """Which attributes each block and unit sets anew, and what it puts there.

    Args:
        modules: blocks and units by name.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        owners = Counter(id(child) for module in modules.values() for child in module.modules())
        self._candidates = {
            name: [child for child in module.modules() if owners[id(child)] == 1] for name, module in modules.items()
        }
        self._places: dict[str, list[Place]] = {}
        self._growing: set[Place] = set()
        self._originals: dict[Place, Any] = {}

    def before_call(self, name: str) -> Held:
        """What :meth:`after_call` compares with."""
        return dict(self._held(name))

    def after_call(self, name: str, before: Held) -> list[Any]:
        """What the observed call of ``name`` has left in attributes: of a list that has grown, what is new in it."""
        left: dict[Place, Any] = {}
        for place, (value, leaves) in self._held(name):
            old_value, old = before.get(place, (None, []))
            if len(old) == len(leaves) and all(a is b for a, b in zip(old, leaves, strict=True)):
                continue
            left[place] = value
            if isinstance(value, list) and value is old_value and _begins_with(value, old):
                self._growing.add(place)
                left[place] = value[len(old) :]
        self._places[name] = list(left)
        return list(left.values())

    def left(self, name: str, before: Held) -> list[Any]:
        """What a call of ``name`` has left in the attributes known by now; of growing lists, what is new."""
        left = []
        for place in self.places(name):
            value: Any = vars(place[0]).get(place[1])
            old = before.get(place, (None, []))[1]
            left.append(value[len(old) :] if place in self._growing else value)
        return left

    def places(self, name: str) -> list[Place]:
        """The attributes that ``name`` sets."""
        return self._places.get(name, [])

    def put(self, place: Place, value: Any) -> None:
        """Let a stand-in take the attribute's place; a list that modules share stays the same one."""
        owner, key = place
        if place in self._growing:
            owner.__dict__[key].extend(value)
            return
        self._originals.setdefault(place, vars(owner).get(key, _MISSING))
        owner.__dict__[key] = value

    def remove(self) -> None:
        """Put back what was there before any stand-in."""
        for (owner, key), value in self._originals.items():
            if value is _MISSING:
                owner.__dict__.pop(key, None)
            else:
                owner.__dict__[key] = value
        self._originals.clear()

    def _held(self, name: str) -> Iterator[tuple[Place, tuple[Any, list[Tensor]]]]:
        for child in self._candidates[name]:
            for key, value in vars(child).items():
                if key in _NOT_OUTPUTS or key.endswith("_hooks") or isinstance(value, nn.Module):
                    continue
                leaves = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
                if leaves or isinstance(value, list):
                    yield (child, key), (value, leaves)


def _begins_with(value: list[Any], old: list[Tensor]) -> bool:
    return len(value) >= len(old) and all(a is b for a, b in zip(value, old, strict=False))
