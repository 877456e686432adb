"""Taking changes back, the last one first, whatever becomes of the run that made them.

At level DEBUG the logger ``lightning_effi`` lists each change when it is made and when it is taken back.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

_logger = logging.getLogger("lightning_effi")
_PACKAGE = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class _Step:
    run: Callable[[], object]
    change: str
    collective: bool


class Undo:
    """A stack of steps, each of which takes back one change.

    Who changes something pushes at once how it is taken back. Steps are *local*, unless they talk to other ranks:
    the local ones are always run, also after a failure; the *collective* ones (gathering shards, say) only after a good
    run, since ranks that have failed do not answer.

    Args:
        lists: whether what is pushed has changed something, and belongs in the list of changes.
    """

    def __init__(self, *, lists: bool = True) -> None:
        self._lists = lists
        self._steps: list[_Step] = []

    def __len__(self) -> int:
        return len(self._steps)

    def push(self, step: Callable[[], object], change: str = "", *, collective: bool = False) -> None:
        """Note how the change just made is taken back.

        Args:
            step: takes the change back.
            change: what was changed, for the list of changes; else they are listed by the name of ``step``.
            collective: whether it talks to other ranks.
        """
        self._steps.append(_Step(step, change or _name(step), collective))
        if self._lists and _logger.isEnabledFor(logging.DEBUG):
            end = "a good run" if collective else "the run, also after an error"
            _logger.debug("change: %s; by %s, until the end of %s", self._steps[-1].change, _caller(), end)

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
                _logger.debug("left, since other ranks are gone: %s", step.change)
                continue
            try:
                step.run()
                _logger.debug("taken back: %s", step.change)
            except Exception as error:
                errors.append(error)
        if errors:
            for further in errors[1:]:
                errors[0].add_note(f"lightning_effi: while changes were taken back, also {further!r}")
            raise errors[0]


@contextmanager
def undone_after_failure() -> Iterator[Undo]:
    """Inside, what is pushed is taken back should an error or an interruption end it; after that it is forgotten.

    Steps must be local: nobody knows whether other ranks have failed too.
    """
    undo = Undo(lists=False)
    try:
        yield undo
    except BaseException as error:
        try:
            undo.run(collective=False)
        except Exception as further:
            error.add_note(f"lightning_effi: while changes were taken back, also {further!r}")
        raise


def _name(step: Callable[[], object]) -> str:
    inner: Any = step.func if isinstance(step, partial) else step
    return str(getattr(inner, "__qualname__", type(inner).__name__))


def _caller() -> str:
    """File and line, within the package, of who pushed a step."""
    frame = sys._getframe(2)
    path = Path(frame.f_code.co_filename)
    return f"{path.relative_to(_PACKAGE) if path.is_relative_to(_PACKAGE) else path.name}:{frame.f_lineno}"
