"""All that draws random numbers: the process-wide generators, and those that a module keeps for itself."""

from __future__ import annotations

import random
import zlib
from typing import Any

import numpy as np
import torch
from torch import nn


class Randomness:
    """The state of all generators that code of ``module`` may draw from; ``None`` leaves out a module's own."""

    def __init__(self, module: nn.Module | None) -> None:
        self._own = [] if module is None else _own_generators(module)

    def get(self) -> dict[str, Any]:
        """Everything, in a form that :meth:`set` takes."""
        return {
            "python": random.getstate(),
            "numpy": np.random.get_state(),
            "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
            "own": [_state(generator) for generator in self._own],
        }

    def set(self, state: dict[str, Any]) -> None:
        """Draw from here on what was drawn after :meth:`get`."""
        random.setstate(state["python"])
        np.random.set_state(state["numpy"])
        torch.set_rng_state(state["torch"])
        if state["cuda"]:
            torch.cuda.set_rng_state_all(state["cuda"])
        for generator, own in zip(self._own, state["own"], strict=True):
            _set_state(generator, own)

    def has_moved(self, state: dict[str, Any]) -> bool:
        """Whether anything was drawn since :meth:`get` gave ``state``."""
        return not _equal(self.get(), state)

    def seed(self, *numbers: int) -> None:
        """Draw from here on what follows from ``numbers`` alone."""
        seed = zlib.crc32(repr(numbers).encode())
        # torch.manual_seed would take a millisecond: it formats the stack for accelerators that start later
        torch.default_generator.manual_seed(seed)
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(seed)
        random.seed(seed)
        np.random.seed(seed)
        for position, generator in enumerate(self._own):
            _seed(generator, zlib.crc32(repr((seed, position)).encode()))


def _own_generators(module: nn.Module) -> list[Any]:
    kinds = (np.random.Generator, np.random.RandomState, random.Random, torch.Generator)
    found = {
        id(value): value for child in module.modules() for value in vars(child).values() if isinstance(value, kinds)
    }
    return list(found.values())


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return all(_equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return all(_equal(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    return bool(np.array_equal(a, b))


def _state(generator: Any) -> Any:
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, random.Random):
        return generator.getstate()
    return generator.get_state()


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(state)


def _seed(generator: Any, seed: int) -> None:
    if isinstance(generator, np.random.Generator):
        fresh: Any = type(generator.bit_generator)
        generator.bit_generator.state = fresh(seed).state
    elif isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    else:
        generator.seed(seed)
