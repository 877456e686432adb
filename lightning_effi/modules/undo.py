"""Taking changes back, the last one first, whatever becomes of the run that made them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class _Step:
    run: Callable[[], object]
    collective: bool


class Undo:
    """A stack of steps, each of which takes back one change.

    Who changes something pushes at once how it is taken back. Steps are *local*, unless they talk to other ranks:
    the local ones are always run, also after a failure; the *collective* ones (gathering shards, say) only after a good
    run, since ranks that have failed do not answer.
    """

    def __init__(self) -> None:
        self._steps: list[_Step] = []

    def __len__(self) -> int:
        return len(self._steps)

    def push(self, step: Callable[[], object], *, collective: bool = False) -> None:
        """Note how the change just made is taken back.

        Args:
            step: takes the change back.
            collective: whether it talks to other ranks.
        """
        self._steps.append(_Step(step, collective))

    def run(self, *, collective: bool = True) -> None:
        """Run all steps in reverse order, each once, and forget them.

        Args:
            collective: whether all ranks are here; otherwise steps that talk to them are left out.

        Raises:
            Exception: the first that a step raised, when all steps have had their turn, with a note on any further.
        """
        errors: list[Exception] = []
        while self._steps:
            step = self._steps.pop()
            if step.collective and not collective:
                continue
            try:
                step.run()
            except Exception as error:
                errors.append(error)
        if errors:
            for further in errors[1:]:
                errors[0].add_note(f"lightning_effi: while changes were taken back, also {further!r}")
            raise errors[0]
