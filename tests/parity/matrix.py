"""The test matrix: which combinations of model, layout and settings are trained and compared."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.harness import ADAMW_FP64, SGD_FP32, Bounds, Training
from tests.models import MODELS

# name → (processes, further arguments of the strategy)
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp1": (1, {}),
    "dp2": (2, {}),
    "dp4": (4, {}),
    "hybrid2x2": (4, {"replicate_size": 2}),
}
# name → (gradient_clip_val, gradient_clip_algorithm); each lies well below the gradients of every model
CLIPPING: dict[str, tuple[float | None, str]] = {
    "unclipped": (None, "norm"),
    "clip_norm": (0.1, "norm"),
    "clip_value": (0.005, "value"),
}
# name → (optimizer, precision, bounds)
OPTIMIZERS: dict[str, tuple[str, str, Bounds]] = {
    "sgd": ("sgd", "32-true", SGD_FP32),
    "adamw": ("adamw", "64-true", ADAMW_FP64),
}


@dataclass(frozen=True)
class Combination:
    """One cell of the matrix. Its string is the test id."""

    model: str
    zero_stage: int
    layout: str = "dp2"
    accumulate: int = 1
    clipping: str = "unclipped"
    optimizer: str = "sgd"

    def __str__(self) -> str:
        parts = [self.model, f"zero{self.zero_stage}", self.layout]
        if self.accumulate > 1:
            parts.append(f"accumulate{self.accumulate}")
        if self.clipping != "unclipped":
            parts.append(self.clipping)
        if self.optimizer != "sgd":
            parts.append(self.optimizer)
        return "-".join(parts)

    @property
    def possible(self) -> bool:
        """Without sharding there are no copies of a sharded group."""
        return not (self.zero_stage == 0 and "replicate_size" in LAYOUTS[self.layout][1])

    @property
    def bounds(self) -> Bounds:
        return OPTIMIZERS[self.optimizer][2]

    def training(self) -> Training:
        """Three optimizer steps of this combination."""
        case = MODELS[self.model]
        world_size, arguments = LAYOUTS[self.layout]
        clip, algorithm = CLIPPING[self.clipping]
        optimizer, precision, _ = OPTIMIZERS[self.optimizer]
        return Training(
            case.module,
            case.batches,
            strategy={"zero_stage": self.zero_stage, **arguments},
            world_size=world_size,
            accumulate=self.accumulate,
            clip=clip,
            clip_algorithm=algorithm,
            optimizer=optimizer,
            precision=precision,
        )


def combinations(**factors: Sequence[Any]) -> list[Combination]:
    """The full product of the factors' values, without impossible combinations."""
    rows = (Combination(**dict(zip(factors, values, strict=True))) for values in itertools.product(*factors.values()))
    return [row for row in rows if row.possible]


def pairwise(**factors: Sequence[Any]) -> list[Combination]:
    """A few combinations in which every possible pair of values of two factors occurs.

    Greedy: of all combinations, repeatedly take the one with the most pairs that have not occurred; of several, the
    one whose values have been used least. Deterministic.
    """
    candidates = [(row, frozenset(_pairs(row, factors))) for row in combinations(**factors)]
    missing: set[Any] = set().union(*(pairs for _, pairs in candidates))
    used: Counter[tuple[str, Any]] = Counter()

    def merit(candidate: tuple[Combination, frozenset[Any]]) -> tuple[int, int]:
        row, pairs = candidate
        return len(pairs & missing), -sum(used[name, getattr(row, name)] for name in factors)

    chosen: list[Combination] = []
    while missing:
        row, pairs = max(candidates, key=merit)
        chosen.append(row)
        missing.difference_update(pairs)
        used.update((name, getattr(row, name)) for name in factors)
    return chosen


def _pairs(row: Combination, factors: Mapping[str, Sequence[Any]]) -> Iterator[tuple[str, Any, str, Any]]:
    for a, b in itertools.combinations(factors, 2):
        yield a, getattr(row, a), b, getattr(row, b)
