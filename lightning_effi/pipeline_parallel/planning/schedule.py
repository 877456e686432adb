"""Schedules as values: which rank holds which stages, and what it does in which order.

Nothing here runs anything. ``gpipe`` and ``1f1b`` are written out below; the orders of the others are those of torch's
schedule generators (through ``compat``), of which nothing else is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal, NamedTuple

from lightning_effi import config
from lightning_effi.compat import torch as torch_compat

Kind = Literal["F", "B", "I", "W"]


class Action(NamedTuple):
    """What a stage does with one micro-batch.

    ``F``: forward. ``B``: backward. ``I`` and ``W``: its two halves, the gradients of what the stage received, for
    which the stage before waits, and the gradients of its parameters, for which nobody waits.
    """

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch}"

    @property
    def frees(self) -> bool:
        """Whether the micro-batch's activations are not needed any more."""
        return self.kind in ("B", "W")


@dataclass(frozen=True)
class Schedule:
    """The actions of each rank, in order."""

    name: str
    ranks: tuple[tuple[Action, ...], ...]

    @cached_property
    def placement(self) -> tuple[int, ...]:
        """The rank of each stage."""
        held = {action.stage: rank for rank, actions in enumerate(self.ranks) for action in actions}
        return tuple(held[stage] for stage in range(len(held)))

    @property
    def microbatches(self) -> int:
        return 1 + max(action.microbatch for action in self.ranks[0])

    def inputs(self, action: Action) -> list[Action]:
        """What must be done before, here or on another rank."""
        _, stage, microbatch = action
        if action.kind == "F":
            return [Action("F", stage - 1, microbatch)] if stage else []
        if action.kind == "W":
            return [Action("I", stage, microbatch)]
        own = Action("F", stage, microbatch)
        return [own, Action(action.kind, stage + 1, microbatch)] if stage + 1 < len(self.placement) else [own]

    def live_activations(self) -> list[int]:
        """The most activations that each rank keeps at once, in those of one micro-batch in one stage."""
        peaks = []
        for actions in self.ranks:
            live = peak = 0
            for action in actions:
                live += (action.kind == "F") - action.frees
                peak = max(peak, live)
            peaks.append(peak)
        return peaks


def place_stages(name: config.Schedule, ranks: int, virtual_stages: int | None = None) -> tuple[int, ...]:
    """The rank of each stage: round after round, or for ``zbv`` down and up again."""
    one_way = range(ranks)
    if name == "zbv":
        return (*one_way, *reversed(one_way))
    return (*one_way,) * config.Pipeline(name, virtual_stages).stages_per_rank


def legal_microbatches(name: config.Schedule, ranks: int, microbatches: int) -> int:
    """The largest number of micro-batches up to ``microbatches`` that the schedule can have.

    ``interleaved`` and ``zb1p`` work in rounds of equal size, of at least one micro-batch per rank.
    """
    if name not in ("interleaved", "zb1p"):
        return microbatches
    return next(m for m in range(microbatches, 0, -1) if m % max(1, m // ranks) == 0)


@lru_cache(maxsize=64)
def make_schedule(name: config.Schedule, ranks: int, microbatches: int, virtual_stages: int | None = None) -> Schedule:
    """The schedule ``name`` of a pipeline of ``ranks`` ranks.

    * ``gpipe``: all forwards, then all backwards (arXiv:1811.06965).
    * ``1f1b``: rank ``r`` runs ``p - r`` forwards and then alternates, so that it keeps the activations of at most
      ``p - r`` micro-batches (arXiv:1806.03377).
    * ``interleaved``: several stages per rank, which makes the bubble smaller by their number (arXiv:2104.04473).
    * ``zb1p``: ``1f1b`` with split backwards; gradients of parameters fill the bubble (arXiv:2401.10241).
    * ``zbv``: the same with two stages per rank in the form of a V, the first and the last on rank 0 (its section 6).

    Args:
        name: see above.
        ranks: of the pipeline.
        microbatches: pieces of a batch.
        virtual_stages: stages per rank; ``None``: the schedule's default.

    Raises:
        ValueError: where the schedule cannot have as many micro-batches (see :func:`legal_microbatches`) or stages.
    """
    count = config.Pipeline(name, virtual_stages).stages_per_rank
    if (legal := legal_microbatches(name, ranks, microbatches)) != microbatches:
        raise ValueError(f"{name!r} on {ranks} ranks cannot have {microbatches} micro-batches. Use {legal}")
    if name == "gpipe":
        return Schedule(name, tuple(_gpipe(rank, microbatches) for rank in range(ranks)))
    if name == "1f1b":
        orders = (_one_forward_one_backward(rank, ranks, microbatches) for rank in range(ranks))
        return Schedule(name, tuple(orders))
    generated = torch_compat.pipeline_order(name, ranks, count, microbatches)
    return Schedule(name, tuple(tuple(Action(*action) for action in actions) for actions in generated))


@lru_cache(maxsize=64)
def forward_schedule(placement: Sequence[int], microbatches: int) -> Schedule:
    """Forwards alone, for evaluation: each rank takes its stages one after the other."""
    return Schedule(
        "forward",
        tuple(
            tuple(
                Action("F", stage, microbatch)
                for stage, holder in enumerate(placement)
                if holder == rank
                for microbatch in range(microbatches)
            )
            for rank in range(1 + max(placement))
        ),
    )


def activation_bound(
    name: config.Schedule, ranks: int, microbatches: int, virtual_stages: int | None = None
) -> list[int]:
    """What :meth:`Schedule.live_activations` may be at most for each rank, by the papers' formulas."""
    count = config.Pipeline(name, virtual_stages).stages_per_rank
    most = count * microbatches
    round_size = microbatches // max(1, microbatches // ranks)
    bounds = {
        "gpipe": lambda rank: most,
        "1f1b": lambda rank: ranks - rank,
        "interleaved": lambda rank: (count - 1) * round_size + 2 * (ranks - 1 - rank) + 1,
        "zb1p": lambda rank: count * max(ranks, round_size),
        "zbv": lambda rank: 2 * ranks,
    }
    return [min(most, bounds[name](rank)) for rank in range(ranks)]


def _gpipe(stage: int, microbatches: int) -> tuple[Action, ...]:
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
