"""Schedules as values: what each rank of a pipeline does in which order, and the timeline that follows.

Nothing here runs anything. A schedule is a list of actions per rank; a timeline gives each action the earliest time at
which its inputs are there, so that bubbles can be seen, counted and drawn before a run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

Kind = Literal["F", "B"]
DURATIONS: Mapping[str, float] = {"F": 1.0, "B": 2.0}
"""A backward computes two gradients for each product of a forward."""


class Action(NamedTuple):
    """Forward (``F``) or backward (``B``) of one micro-batch on one stage."""

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch}"


@dataclass(frozen=True)
class Schedule:
    """The actions of each rank, in order. ``ranks[r]`` belongs to rank ``r``, which holds stage ``r``."""

    name: str
    ranks: tuple[tuple[Action, ...], ...]

    @property
    def microbatches(self) -> int:
        return 1 + max(action.microbatch for action in self.ranks[0])

    def forward_only(self) -> Schedule:
        """The same order without backwards, for evaluation."""
        return Schedule(self.name, tuple(tuple(a for a in actions if a.kind == "F") for actions in self.ranks))

    def live_activations(self) -> list[int]:
        """The most micro-batches whose activations each rank keeps at once."""
        peaks = []
        for actions in self.ranks:
            live = peak = 0
            for action in actions:
                live += 1 if action.kind == "F" else -1
                peak = max(peak, live)
            peaks.append(peak)
        return peaks


def make_schedule(name: str, stages: int, microbatches: int) -> Schedule:
    """The schedule ``name`` of ``stages`` ranks for any number of micro-batches.

    ``gpipe`` runs all forwards, then all backwards (arXiv:1811.06965). ``1f1b`` lets stage ``s`` run ``p - s`` forwards
    and then alternate, so that it keeps at most ``p - s`` micro-batches' activations (arXiv:1806.03377).
    """
    orders = {"gpipe": _gpipe, "1f1b": _one_forward_one_backward}
    return Schedule(name, tuple(orders[name](stage, stages, microbatches) for stage in range(stages)))


def _gpipe(stage: int, _stages: int, microbatches: int) -> tuple[Action, ...]:
    forwards = [Action("F", stage, i) for i in range(microbatches)]
    return (*forwards, *(Action("B", stage, i) for i in range(microbatches)))


def _one_forward_one_backward(stage: int, stages: int, microbatches: int) -> tuple[Action, ...]:
    ahead = min(stages - stage, microbatches)
    actions = [Action("F", stage, i) for i in range(ahead)]
    for i in range(microbatches):
        actions.append(Action("B", stage, i))
        if ahead + i < microbatches:
            actions.append(Action("F", stage, ahead + i))
    return tuple(actions)


class Span(NamedTuple):
    """An action with its time."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """A schedule in time. ``print(timeline)`` draws a row per rank; :meth:`save` draws it as a picture."""

    name: str
    ranks: tuple[tuple[Span, ...], ...]

    @classmethod
    def of(cls, schedule: Schedule, durations: Mapping[str, float] = DURATIONS) -> Timeline:
        """Every action as early as its rank is free and its inputs have arrived (messages take no time).

        Raises:
            ValueError: where ranks would wait for each other for ever.
        """
        done: dict[Action, float] = {}
        spans: list[list[Span]] = [[] for _ in schedule.ranks]
        last = len(schedule.ranks) - 1
        while any(len(found) < len(actions) for found, actions in zip(spans, schedule.ranks, strict=True)):
            progress = False
            for found, actions in zip(spans, schedule.ranks, strict=True):
                while len(found) < len(actions):
                    action = actions[len(found)]
                    inputs = _inputs(action, last)
                    if any(needed not in done for needed in inputs):
                        break
                    start = max([found[-1].end if found else 0.0, *(done[needed] for needed in inputs)])
                    done[action] = start + durations[action.kind]
                    found.append(Span(action, start, done[action]))
                    progress = True
            if not progress:
                raise ValueError(f"schedule {schedule.name!r}: the ranks wait for each other")
        return cls(schedule.name, tuple(tuple(found) for found in spans))

    @property
    def makespan(self) -> float:
        return max(span.end for spans in self.ranks for span in spans)

    @property
    def bubble(self) -> float:
        """The fraction of time in which ranks wait; ``(p - 1) / (m + p - 1)`` for ``gpipe`` and ``1f1b``."""
        busy = sum(span.end - span.start for spans in self.ranks for span in spans)
        return 1.0 - busy / (self.makespan * len(self.ranks))

    def describe(self) -> str:
        """``1f1b, 8 micro-batches, bubble 27%``."""
        count = 1 + max(span.action.microbatch for span in self.ranks[0])
        return f"{self.name}, {count} micro-batches, bubble {self.bubble:.0%}"

    def __str__(self) -> str:
        """One row per rank; a forward takes one cell, a backward two, a dot is a unit of waiting."""
        width = max(len(str(span.action)) for spans in self.ranks for span in spans) + 1
        rows = [f"{self.describe()}"]
        for rank, spans in enumerate(self.ranks):
            cells = ["."] * round(self.makespan)
            for span in spans:
                cells[round(span.start)] = str(span.action)
                for time in range(round(span.start) + 1, round(span.end)):
                    cells[time] = "="
            rows.append(f"rank {rank} " + "".join(cell.ljust(width) for cell in cells).rstrip())
        return "\n".join(rows)

    def save(self, path: str | Path) -> None:
        """Draw the timeline as an image; the file name's ending says which kind. Needs matplotlib."""
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        figure = Figure(figsize=(max(6.0, self.makespan / 3), 0.8 + 0.5 * len(self.ranks)), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots()
        for rank, spans in enumerate(self.ranks):
            for span in spans:
                self._draw(axes, rank, span)
        axes.set_title(f"{self.describe()}: {len(self.ranks)} stages", fontsize=10)
        axes.set_yticks(range(len(self.ranks)), [f"rank {rank}" for rank in range(len(self.ranks))])
        axes.set_xlim(0, self.makespan)
        axes.invert_yaxis()
        axes.set_xlabel("time (one forward of a stage = 1)")
        figure.savefig(path, dpi=120)

    @staticmethod
    def _draw(axes: Any, rank: int, span: Span) -> None:
        color = {"F": "#7aa6d8", "B": "#e3a15f"}[span.action.kind]
        axes.barh(rank, span.end - span.start, left=span.start, height=0.8, color=color, edgecolor="white")
        middle = (span.start + span.end) / 2
        axes.text(middle, rank, str(span.action.microbatch), ha="center", va="center", fontsize=8)


def _inputs(action: Action, last: int) -> Sequence[Action]:
    """What must be done before: the forward of the stage before, or the backward of the stage behind."""
    if action.kind == "F":
        return [Action("F", action.stage - 1, action.microbatch)] if action.stage else []
    own = Action("F", action.stage, action.microbatch)
    return [own, Action("B", action.stage + 1, action.microbatch)] if action.stage < last else [own]
