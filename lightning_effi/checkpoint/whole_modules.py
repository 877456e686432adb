"""Whole modules among what a checkpoint holds, as ``save_hyperparameters()`` puts there every module that it is given.

Stock strategies pickle them as they are. Here the module at work is sharded or split, has classes of FSDP2 and lies on
several ranks. So its structure is pickled before set-up, without tensors, and put into the checkpoint with the values
that the module has when it is saved.
"""

from __future__ import annotations

import io
import pickle
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

_SAVED_OTHERWISE = frozenset({"state_dict", "optimizer_states"})


class WholeModules:
    """Remembers the structure of a module that is about to be set up.

    Args:
        module: intact. Of its children that have parameters, those that can be pickled can be put into checkpoints.
    """

    def __init__(self, module: nn.Module) -> None:
        self._names = {
            id(found): (weakref.ref(found), name)
            for name, found in module.named_modules()
            if name and next(found.parameters(), None) is not None
        }
        self._keys = {id(tensor): key for key, tensor in reversed(module.state_dict(keep_vars=True).items())}
        self._others: list[Tensor] = []
        self._structures: dict[str, bytes | Exception] = {
            name: self._pickled(child) for name, child in module.named_children() if id(child) in self._names
        }
        self._keys.clear()  # tensors of the intact module go, and their ids with them

    def found_in(self, checkpoint: Mapping[str, Any]) -> bool:
        """Whether the checkpoint holds one of the modules."""
        return any(self._search(value)[0] for value in self._values(checkpoint).values())

    def replaced(self, checkpoint: Mapping[str, Any], state: Mapping[str, Any]) -> dict[str, Any]:
        """The checkpoint with plain modules in place of those at work.

        Args:
            checkpoint: of Lightning; nothing is changed in it.
            state: full values by key of the module's state dict; tensors that it lacks lie on ``meta``.

        Raises:
            ValueError: for a module whose structure could not be pickled.
        """
        roots: dict[str, nn.Module] = {}
        tensors: dict[str, Tensor] = {}

        def module(name: str) -> nn.Module:
            child, _, rest = name.partition(".")
            if child not in roots:
                structure = self._structures[child]
                if isinstance(structure, Exception):
                    raise ValueError(f"the checkpoint holds the module {child!r} as a whole: {structure}")
                roots[child] = _loads(structure, lambda reference: self._tensor(reference, state, tensors))
            return roots[child].get_submodule(rest)

        changed = dict(checkpoint)
        for key, value in self._values(checkpoint).items():
            found, data, kept = self._search(value)
            if found:
                changed[key] = _loads(data, lambda what: module(what) if isinstance(what, str) else kept[what])  # noqa: B023
        return changed

    def _values(self, checkpoint: Mapping[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in checkpoint.items() if key not in _SAVED_OTHERWISE}

    def _search(self, value: Any) -> tuple[bool, bytes, list[Tensor]]:
        """Whether modules were found, and the value pickled without them and without tensors."""
        found, kept = [], []

        def reference(part: Any) -> str | int | None:
            if isinstance(part, nn.Module) and id(part) in self._names:
                known, name = self._names[id(part)]
                if known() is part:
                    found.append(name)
                    return name
            if isinstance(part, Tensor):
                kept.append(part)
                return len(kept) - 1
            return None

        try:
            data = _dumps(value, reference)
        except Exception:  # whether it can be written is for the checkpoint's plugin to say, as with stock strategies
            return False, b"", kept
        return bool(found), data, kept

    def _pickled(self, child: nn.Module) -> bytes | Exception:
        def reference(part: Any) -> tuple[Any, ...] | None:
            if not isinstance(part, Tensor):
                return None
            if id(part) not in self._keys:
                self._others.append(part)
                return (len(self._others) - 1,)
            kind = type(part) if isinstance(part, nn.Parameter) else Tensor
            return self._keys[id(part)], kind is not Tensor, part.requires_grad, tuple(part.shape), part.dtype

        try:
            return _dumps(child, reference)
        except Exception as error:  # raised where a checkpoint needs it; most never do
            return error

    def _tensor(self, reference: tuple[Any, ...], state: Mapping[str, Any], made: dict[str, Tensor]) -> Tensor:
        if len(reference) == 1:
            return self._others[reference[0]]
        key, is_parameter, requires_grad, shape, dtype = reference
        if key not in made:
            value = state[key] if key in state else torch.empty(shape, dtype=dtype, device="meta")
            made[key] = nn.Parameter(value, requires_grad) if is_parameter else value
        return made[key]


def _dumps(value: Any, reference: Callable[[Any], Any]) -> bytes:
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer)
    pickler.persistent_id = reference  # type: ignore[method-assign]
    pickler.dump(value)
    return buffer.getvalue()


def _loads(data: bytes, resolve: Callable[[Any], Any]) -> Any:
    """Of what this process has pickled."""
    unpickler = pickle.Unpickler(io.BytesIO(data))
    unpickler.persistent_load = resolve  # type: ignore[method-assign]
    return unpickler.load()
