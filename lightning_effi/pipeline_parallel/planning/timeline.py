"""A schedule in time, so that bubbles can be seen, counted and drawn before a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from lightning_effi.pipeline_parallel.planning.schedule import Action, Schedule

DURATIONS: Mapping[str, float] = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
"""A backward computes two gradients for each product of a forward."""

_COLORS = {"F": "#7aa6d8", "B": "#e3a15f", "I": "#e3a15f", "W": "#8fbf88"}
_MEANINGS = {"F": "forward", "B": "backward", "I": "gradients of inputs", "W": "gradients of parameters"}


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

        Args:
            schedule: of all ranks.
            durations: of each kind of action in one stage.

        Raises:
            ValueError: where ranks would wait for each other for ever.
        """
        done: dict[Action, float] = {}
        spans: list[list[Span]] = [[] for _ in schedule.ranks]
        while any(len(found) < len(actions) for found, actions in zip(spans, schedule.ranks, strict=True)):
            progress = False
            for found, actions in zip(spans, schedule.ranks, strict=True):
                while len(found) < len(actions):
                    action = actions[len(found)]
                    inputs = schedule.inputs(action)
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
        """The fraction of time in which ranks wait.

        With ``p`` ranks, ``m`` micro-batches and ``v`` stages per rank it is ``(p - 1) / (m + p - 1)`` for ``gpipe``
        and ``1f1b``; where ``m`` is a multiple of ``p``, ``(p - 1) / (v m + p - 1)`` for ``interleaved`` and
        ``(p - 1) / (3 v m + p - 1)`` for ``zb1p``; the last also for ``zbv`` from ``m = 2 p - 1`` on.
        """
        busy = sum(span.end - span.start for spans in self.ranks for span in spans)
        return 1.0 - busy / (self.makespan * len(self.ranks))

    @cached_property
    def stages(self) -> tuple[tuple[int, ...], ...]:
        """The stages of each rank."""
        return tuple(tuple(sorted({span.action.stage for span in spans})) for spans in self.ranks)

    def describe(self) -> str:
        """``1f1b, 8 micro-batches, bubble 27%``."""
        count = 1 + max(span.action.microbatch for span in self.ranks[0])
        return f"{self.name}, {count} micro-batches, bubble {self.bubble:.0%}"

    def __str__(self) -> str:
        """One row per rank and a cell per unit of time, a forward's; a dot is a unit of waiting, ``=`` goes on.

        The first stage of a rank that holds several is ``a``, the next ``b``, and so on.
        """
        width = max(len(self._label(rank, span)) for rank, spans in enumerate(self.ranks) for span in spans) + 1
        rows = [self.describe()]
        for rank, spans in enumerate(self.ranks):
            cells = ["."] * round(self.makespan)
            for span in spans:
                cells[round(span.start)] = self._label(rank, span)
                for time in range(round(span.start) + 1, round(span.end)):
                    cells[time] = "="
            rows.append(f"rank {rank} " + "".join(cell.ljust(width) for cell in cells).rstrip())
        return "\n".join(rows)

    def save(self, path: str | Path) -> None:
        """Draw the timeline as an image; the file name's ending says which kind.

        Raises:
            ImportError: without matplotlib (``pip install lightning-effi[plot]``).
        """
        try:
            from matplotlib.backends.backend_agg import FigureCanvasAgg
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ImportError("Timeline.save needs matplotlib: pip install 'lightning-effi[plot]'") from error
        figure = Figure(figsize=(max(6.0, self.makespan / 3), 1.2 + 0.5 * len(self.ranks)), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots()
        for rank, spans in enumerate(self.ranks):
            for span in spans:
                self._draw(axes, rank, span)
        several = max(map(len, self.stages)) > 1
        axes.set_title(f"{self.describe()}: {len(self.ranks)} ranks, {sum(map(len, self.stages))} stages", fontsize=10)
        labels = [
            f"rank {rank}" + (f": stages {', '.join(map(str, held))}" if several else "")
            for rank, held in enumerate(self.stages)
        ]
        axes.set_yticks(range(len(self.ranks)), labels)
        axes.set_xlim(0, self.makespan)
        axes.invert_yaxis()
        axes.set_xlabel("time (one forward of a stage = 1)")
        figure.legend(handles=self._legend(), loc="outside lower center", ncols=4, fontsize=8)
        figure.savefig(path, dpi=120)

    def _label(self, rank: int, span: Span) -> str:
        held = self.stages[rank]
        return str(span.action) + ("" if len(held) == 1 else chr(ord("a") + held.index(span.action.stage)))

    def _draw(self, axes: Any, rank: int, span: Span) -> None:
        round_of_rank = self.stages[rank].index(span.action.stage)
        axes.barh(
            rank,
            span.end - span.start,
            left=span.start,
            height=0.8,
            color=_COLORS[span.action.kind],
            alpha=1.0 - 0.4 * round_of_rank / max(1, len(self.stages[rank]) - 1),
            edgecolor="white",
        )
        middle = (span.start + span.end) / 2
        axes.text(middle, rank, str(span.action.microbatch), ha="center", va="center", fontsize=8)

    def _legend(self) -> list[Any]:
        from matplotlib.patches import Patch

        kinds = {span.action.kind for spans in self.ranks for span in spans}
        return [Patch(color=_COLORS[kind], label=_MEANINGS[kind]) for kind in _COLORS if kind in kinds]


@lru_cache(maxsize=64)
def timeline_of(schedule: Schedule) -> Timeline:
    """:meth:`Timeline.of` with the usual durations, worked out once for each schedule."""
    return Timeline.of(schedule)
