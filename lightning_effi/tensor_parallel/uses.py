"""What the first training step does with logits that are in parts: said once, since it decides what they cost."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_effi.tensor_parallel.rules import on_gather
from lightning_effi.tensor_parallel.rules.vocabulary import on_loss


class UsesOfLogits:
    """Watches a step between ``__enter__`` and ``__exit__``, until :meth:`say` has said what it saw.

    Args:
        heads: names of the layers whose outputs are logits in parts.
    """

    def __init__(self, heads: Iterable[str] = ()) -> None:
        self._heads = frozenset(heads)
        self._is_said = not self._heads
        self._gathered: dict[str, None] = {}
        self._losses = 0
        self._watching = ExitStack()

    def __enter__(self) -> None:
        if not self._is_said:
            self._watching.enter_context(on_gather(self._note))
            self._watching.enter_context(on_loss(self._count))

    def __exit__(self, *_: Any) -> None:
        self._watching.close()

    def say(self) -> None:
        """Print what the step did; nothing where no logits came up."""
        if self._is_said:
            return
        self._is_said = True
        said = ["the loss is computed on parts of the vocabulary"] if self._losses else []
        if self._gathered:
            said.append(f"whole logits are put together for {', '.join(self._gathered)}")
        if said:
            rank_zero_info(f"tensor parallelism: {'; '.join(said)}")

    def _note(self, function: str, sources: frozenset[str]) -> None:
        if sources & self._heads:
            self._gathered[function] = None

    def _count(self) -> None:
        self._losses += 1
