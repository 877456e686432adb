"""Which stage runs what, and what crosses each boundary. A value, made from a trace without communication."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from lightning_effi.pipeline_parallel.planning.timeline import Timeline
from lightning_effi.pipeline_parallel.planning.trace import Trace, Use
from lightning_effi.pipeline_parallel.stand_ins import TensorMeta


@dataclass(frozen=True)
class Stage:
    """Blocks and units that one stage runs, and the parameters it holds with their elements, by their first names."""

    blocks: tuple[str, ...]
    units: tuple[str, ...]
    parameters: tuple[str, ...]
    numels: tuple[int, ...]

    @property
    def numel(self) -> int:
        return sum(self.numels)


@dataclass(frozen=True)
class Boundary:
    """What a stage receives: these leaves of the arguments of its first block."""

    arguments: tuple[int, ...]
    metas: tuple[TensorMeta, ...]

    @property
    def bytes(self) -> int:
        return sum(meta.bytes for meta in self.metas)


@dataclass(frozen=True)
class PipelinePlan:
    """Stages in order; ``boundaries[i]`` lies before stage ``i + 1``. ``print(plan)`` tells it all.

    Attributes:
        shared: parameters that several stages hold, with those stages.
        timeline: who does what when, in units of one forward.
        placement: the rank of each stage.
    """

    stages: tuple[Stage, ...]
    boundaries: tuple[Boundary, ...]
    shared: tuple[tuple[str, tuple[int, ...]], ...]
    timeline: Timeline
    placement: tuple[int, ...]

    @cached_property
    def ranks(self) -> tuple[Stage, ...]:
        """What each rank runs and holds, which may be several stages; a parameter of two of them is one there."""
        return tuple(
            _joined([stage for stage, holder in zip(self.stages, self.placement, strict=True) if holder == rank])
            for rank in range(1 + max(self.placement))
        )

    @property
    def shared_by_ranks(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Parameters that several ranks hold, with those ranks."""
        holders = ((name, tuple(sorted({self.placement[stage] for stage in held}))) for name, held in self.shared)
        return tuple((name, ranks) for name, ranks in holders if len(ranks) > 1)

    def stage_of(self, position: int) -> int:
        """The stage that runs what comes when ``position`` blocks have been called."""
        ends = itertools.accumulate(len(stage.blocks) for stage in self.stages)
        return next(index for index, end in enumerate(ends) if position <= end)

    def __str__(self) -> str:
        lines = [f"pipeline of {len(self.stages)} stages, {self.timeline.describe()}"]
        for index, stage in enumerate(self.stages):
            units = f" and {', '.join(stage.units)}" if stage.units else ""
            where = f" on rank {self.placement[index]}" if len(self.stages) > len(self.ranks) else ""
            lines.append(f"stage {index}{where}: {_span(stage.blocks)}{units}; {stage.numel:,} parameters")
            if index < len(self.boundaries):
                shapes = ", ".join(f"{list(m.shape)} {_short(m)}" for m in self.boundaries[index].metas)
                lines.append(f"  -> {shapes}: {self.boundaries[index].bytes:,} bytes per micro-batch")
        for name, holders in self.shared:
            lines.append(f"held by stages {', '.join(map(str, holders))}: {name}")
        return "\n".join(lines)


def plan_stages(
    trace: Trace,
    parameters: Mapping[str, Sequence[str]],
    numels: Mapping[str, int],
    sizes: Sequence[int] | int,
    stages_per_rank: int = 1,
) -> tuple[tuple[Stage, ...], tuple[Boundary, ...], tuple[tuple[str, tuple[int, ...]], ...]]:
    """Stages, boundaries and shared parameters.

    Args:
        trace: of one step.
        parameters: first names of the parameters of each block and unit.
        numels: elements of each parameter by first name.
        sizes: blocks per stage, or the number of stages, which are then balanced by floating-point operations.
        stages_per_rank: of the schedule, for the message about too few blocks.

    Raises:
        ValueError: where there are too few blocks, or a value would have to bypass a boundary.
    """
    firsts = _first_blocks(trace, sizes, stages_per_rank)
    ends = [*firsts[1:], len(trace.blocks)]
    refuse_bypasses(trace, firsts[1:])
    stage_of = [index for index, (start, end) in enumerate(zip(firsts, ends, strict=True)) for _ in range(start, end)]

    def stage_at(position: int) -> int:
        """The stage that really runs what comes when ``position`` blocks have been called."""
        return stage_of[max(position - 1, 0)]

    units: list[list[str]] = [[] for _ in firsts]
    for name, positions in trace.units.items():
        for stage in sorted({stage_at(position) for position in positions}):
            units[stage].append(name)
    stages = []
    for index, (start, end) in enumerate(zip(firsts, ends, strict=True)):
        blocks = tuple(trace.blocks[start:end])
        held = [name for module in (*blocks, *units[index]) for name in parameters[module]]
        # code between the modules runs on its own stage and on all later ones, which pass through it
        held += [name for name, position in trace.parameters.items() if stage_at(position) <= index]
        unique = tuple(dict.fromkeys(held))
        stages.append(Stage(blocks, tuple(units[index]), unique, tuple(numels[name] for name in unique)))
    boundaries = tuple(
        Boundary(trace.arguments[trace.blocks[first]], trace.metas[trace.blocks[first]]) for first in firsts[1:]
    )
    _refuse_complex(trace, firsts[1:])
    holders: dict[str, list[int]] = {}
    for index, each in enumerate(stages):
        for name in each.parameters:
            holders.setdefault(name, []).append(index)
    shared = tuple((name, tuple(held)) for name, held in holders.items() if len(held) > 1)
    return tuple(stages), boundaries, shared


def _first_blocks(trace: Trace, sizes: Sequence[int] | int, stages_per_rank: int) -> list[int]:
    """Index of each stage's first block."""
    blocks = trace.blocks
    count = sizes if isinstance(sizes, int) else len(sizes)
    if len(blocks) < count:
        found = f"has {len(blocks)}" if blocks else "calls none: no list of repeated blocks was found in the module"
        if blocks and len(blocks) < trace.known:
            found = f"calls {len(blocks)} of the module's {trace.known} (layer drop must be switched off)"
        elif not blocks and trace.known:
            found = f"calls none of the module's {trace.known}, but their parts or other methods than forward"
        if len(blocks) == trace.known and trace.shared:
            found = f"has {len(blocks) or 'none'} without shared parameters ({'; '.join(trace.shared)})"
        ranks = count // stages_per_rank
        if len(blocks) >= ranks:
            raise ValueError(
                f"{count} pipeline stages, {stages_per_rank} on each of {ranks} ranks, need at least {count} blocks,"
                f" and the step {found}. Use a schedule with one stage per rank: pipeline='1f1b' or 'zb1p'"
            )
        raise ValueError(
            f"{count} pipeline stages need at least {count} blocks, and the step {found}. Use pipeline_parallel_size="
            f"{max(len(blocks), 1)} or fewer"
        )
    if not isinstance(sizes, int):
        if sum(sizes) != len(blocks) or min(sizes) < 1:
            raise ValueError(f"pipeline split={list(sizes)} must add up to the {len(blocks)} blocks of the module")
        return [0, *itertools.accumulate(sizes[:-1])]
    known = [trace.flops[name] for name in blocks if trace.flops[name]]
    typical = sum(known) / len(known) if known else 1.0  # for blocks whose operations could not be counted
    costs = [float(trace.flops[name] or typical) for name in blocks]
    for name, positions in trace.units.items():
        for position in positions:
            costs[max(position - 1, 0)] += trace.flops[name]
    return balanced(costs, count)


def balanced(costs: Sequence[float], parts: int) -> list[int]:
    """Where to cut ``costs`` into contiguous, non-empty parts so that the largest sum is least.

    Of several such ways, the one whose sums are the most even (least sum of squares).
    """
    total = [0.0, *itertools.accumulate(costs)]
    count = len(costs)
    best: dict[int, tuple[float, float, list[int]]] = {0: (0.0, 0.0, [])}
    for part in range(1, parts + 1):
        following: dict[int, tuple[float, float, list[int]]] = {}
        for end in range(part, count - (parts - part) + 1):
            options = []
            for start, (largest, squares, firsts) in best.items():
                if start < end:
                    cost = total[end] - total[start]
                    options.append((max(largest, cost), squares + cost * cost, [*firsts, start]))
            following[end] = min(options)
        best = following
    return best[count][2]


def refuse_bypasses(trace: Trace, boundaries: Sequence[int]) -> None:
    """Only arguments of a stage's first block, used by its blocks as arguments, get across a boundary."""
    for first in boundaries:
        block = trace.blocks[first]
        crossing = trace.values[block]
        for use in trace.uses:
            if use.born <= first < use.at:
                _refuse(use, block)
        for use in trace.block_uses:
            if use.born <= first < use.at and use.value not in crossing:
                _refuse(use, block)


def _refuse_complex(trace: Trace, boundaries: Sequence[int]) -> None:
    """No backend's messages carry complex numbers, and gradients of them do not flow back."""
    for first in boundaries:
        block = trace.blocks[first]
        if any(meta.dtype.is_complex for meta in trace.metas[block]):
            raise ValueError(
                f"pipeline: '{block}' is given complex numbers that the model computed, which cannot be sent from stage"
                " to stage. Hand blocks real and imaginary parts (torch.view_as_real), or use pipeline_parallel_size=1"
            )


def _refuse(use: Use, block: str) -> None:
    raise ValueError(
        f"pipeline: {use.origin} computed before '{block}' is used after it by {use.by}{use.line}, but is no"
        f" argument of '{block}', so that it cannot reach the stage that begins there. Pass it through the blocks, move"
        " the cut with Pipeline(split=[...]), or use pipeline_parallel_size=1"
    )


def _joined(stages: Sequence[Stage]) -> Stage:
    numels = {name: numel for stage in stages for name, numel in zip(stage.parameters, stage.numels, strict=True)}
    return Stage(
        tuple(block for stage in stages for block in stage.blocks),
        tuple(dict.fromkeys(unit for stage in stages for unit in stage.units)),
        tuple(numels),
        tuple(numels.values()),
    )


def _span(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]} ({len(names)} blocks)"


def _short(meta: TensorMeta) -> str:
    return str(meta.dtype).removeprefix("torch.")
