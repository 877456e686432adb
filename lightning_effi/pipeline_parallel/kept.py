"""Tensors that blocks and units leave in attributes of their own, as a router leaves the loss of its balance.

A step may read them after the call (``sum(block.aux_loss for block in blocks)``), so they are outputs as much as what
is returned. A stage that does not run the module would find what another run left there: values of an old batch, and
no graph. Placeholders take their place, and a trace sees who reads them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from lightning_effi.pipeline_parallel.tree import tree_leaves

Place = tuple[nn.Module, str]
_MISSING = object()
_NOT_OUTPUTS = frozenset({"_parameters", "_buffers", "_modules"})


class KeptTensors:
    """Which attributes a run of the whole module sets anew, and what stands in them.

    Args:
        modules: blocks and units by name, before the run.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._modules = modules
        owners = Counter(id(child) for module in modules.values() for child in module.modules())
        self._candidates = {
            name: [child for child in module.modules() if owners[id(child)] == 1] for name, module in modules.items()
        }
        self._before = {place: leaves for _, place, leaves in self._tensors()}
        self.places: dict[str, list[Place]] = {}
        """For each block and unit, the attributes that it set."""
        self.values: dict[Place, Any] = {}
        """What it put there."""
        self._originals: dict[Place, Any] = {}

    def note(self) -> None:
        """After the run."""
        for name, place, leaves in self._tensors():
            before = self._before.get(place, [])
            if len(before) != len(leaves) or any(a is not b for a, b in zip(before, leaves, strict=True)):
                self.places.setdefault(name, []).append(place)
                self.values[place] = vars(place[0])[place[1]]
        self._before.clear()

    def left_by(self, name: str) -> dict[Place, Any]:
        """What a block or unit left in attributes."""
        return {place: self.values[place] for place in self.places.get(name, ())}

    def put(self, place: Place, value: Any) -> None:
        """Let a placeholder take the attribute's place."""
        owner, key = place
        self._originals.setdefault(place, vars(owner).get(key, _MISSING))
        owner.__dict__[key] = value

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Inside, placeholders are put in the places of values that are needed again."""
        before = {(o, key): vars(o).get(key, _MISSING) for places in self.places.values() for o, key in places}
        try:
            yield
        finally:
            _put_back(before)

    def remove(self) -> None:
        """Put back what was there before any placeholder."""
        _put_back(self._originals)
        self._originals.clear()

    def _tensors(self) -> Iterator[tuple[str, Place, list[Tensor]]]:
        for name, children in self._candidates.items():
            for child in children:
                for key, value in vars(child).items():
                    if key in _NOT_OUTPUTS or key.endswith("_hooks") or isinstance(value, nn.Module):
                        continue
                    leaves = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
                    if leaves:
                        yield name, (child, key), leaves


def _put_back(values: Mapping[Place, Any]) -> None:
    for (owner, key), value in values.items():
        if value is _MISSING:
            owner.__dict__.pop(key, None)
        else:
            owner.__dict__[key] = value
