"""Tensors of a directory that have not been read: hooks may drop, rename and copy them, and they are read where needed.

A stored tensor has shape and dtype and lies on ``meta``. It knows where its values are, which each rank reads into the
shard that it holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_effi.checkpoint.directory import Directory, fill

_ATTRIBUTE = "lightning_effi_stored"


def stored_tensor(directory: Directory, key: str) -> Tensor:
    """The tensor that a directory has under ``key``, without its values."""
    entry = directory.entries[key]
    tensor = torch.empty(entry.shape, dtype=entry.dtype, device="meta")
    setattr(tensor, _ATTRIBUTE, (directory, key))
    return tensor


def is_stored(value: Any) -> bool:
    """Whether this is a tensor whose values have not been read."""
    return hasattr(value, _ATTRIBUTE)


def read_model(state: Mapping[str, Any], current: Mapping[str, Any]) -> dict[str, Any]:
    """A state dict with values in place of stored tensors, each laid out as the module's own.

    What the module does not have is left to ``load_state_dict``, which names it.
    """
    targets = {
        key: torch.empty_like(current[key], device="cpu" if current[key].is_meta else None)
        for key, value in state.items()
        if is_stored(value) and isinstance(current.get(key), Tensor)
    }
    _read([(state[key], target) for key, target in targets.items()])
    missing = {key: torch.empty(0) for key, value in state.items() if is_stored(value) and key not in targets}
    result = {**state, **targets, **missing}
    _refuse_without_values(result)
    return result


def read_optimizers(
    states: Sequence[Mapping[str, Any]], parameters: Sequence[Mapping[int, Tensor]]
) -> list[Mapping[str, Any]]:
    """State dicts of optimizers with values in place of stored tensors, laid out as the parameters are.

    Args:
        states: of all optimizers; nothing is changed in them.
        parameters: of each, by their position in the state dict.
    """
    pairs: list[tuple[Tensor, Tensor]] = []

    def target(value: Any, parameter: Tensor) -> Any:
        if not is_stored(value):
            return value
        if value.shape == parameter.shape:
            empty = torch.empty_like(parameter, dtype=value.dtype).detach()
        else:
            empty = torch.empty(value.shape, dtype=value.dtype)
        pairs.append((value, empty))
        return empty

    filled: list[Mapping[str, Any]] = []
    for state, own in zip(states, parameters, strict=True):
        moments = {
            position: {key: target(value, own[position]) for key, value in entries.items()}
            for position, entries in state["state"].items()
        }
        for entries in moments.values():
            _refuse_without_values(entries)
        filled.append({**state, "state": moments})
    _read(pairs)
    return filled


def _read(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Fill each second tensor with the values of the first."""
    wanted: dict[int, tuple[Directory, dict[str, list[Tensor]]]] = {}
    for value, target in pairs:
        directory, key = getattr(value, _ATTRIBUTE)
        wanted.setdefault(id(directory), (directory, {}))[1].setdefault(key, []).append(target)
    for directory, targets in wanted.values():
        fill(directory, {key: found[0] for key, found in targets.items()})
        for first, *others in targets.values():  # tied, or stored once and wanted under two names
            for other in others:
                other.copy_(first)


def _refuse_without_values(values: Mapping[str, Any]) -> None:
    for key, value in values.items():
        if isinstance(value, Tensor) and value.is_meta:
            raise ValueError(
                f"{key!r} has no values: tensors of a sharded checkpoint are read after on_load_checkpoint, which may"
                " drop or rename them, but not compute with them"
            )
