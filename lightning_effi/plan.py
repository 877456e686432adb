"""The plan of a run: axes, what is sharded how, and the bytes per rank. A value that prints itself."""

from __future__ import annotations

from dataclasses import dataclass, field

from lightning_effi.data_parallel.plan import ShardingPlan
from lightning_effi.layout import Layout
from lightning_effi.pipeline_parallel.planning.plan import PipelinePlan
from lightning_effi.pipeline_parallel.planning.timeline import Timeline
from lightning_effi.tensor_parallel.planning.plan import TensorPlan

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


@dataclass(frozen=True)
class Plan:
    """What :class:`~lightning_effi.EffiStrategy` will do; ``print(strategy.plan)`` shows it."""

    layout: Layout
    sharding: ShardingPlan
    precision: str
    moments: int | None = None
    pipeline: PipelinePlan | None = None
    tensor: TensorPlan | None = None
    notes: tuple[str, ...] = field(default=())

    @property
    def bytes_per_rank(self) -> dict[str, int]:
        """Bytes that one rank holds at the end of a backward pass, by kind."""
        return self.sharding.bytes_per_rank(self.moments)

    @property
    def timeline(self) -> Timeline:
        """Who does what when in the pipeline; it prints itself, and :meth:`Timeline.save` draws it.

        Raises:
            RuntimeError: where there is no pipeline, or the first training step has not come yet.
        """
        if self.pipeline is None:
            raise RuntimeError("plan.timeline needs pipeline_parallel_size > 1, and is known from the first step on")
        return self.pipeline.timeline

    def __str__(self) -> str:
        costs = ", ".join(f"{kind} {format_bytes(count)}" for kind, count in self.bytes_per_rank.items())
        lines = [
            f"{self.layout.world_size} processes ({self.layout}), precision {self.precision}",
            *(() if self.tensor is None else str(self.tensor).splitlines()),
            *(str(self.pipeline).splitlines() if self.pipeline else ()),
            *(str(self.sharding).splitlines() if self.pipeline is None or self.sharding.is_sharded else ()),
            f"bytes per rank: {costs}",
            *self.notes,
        ]
        return "\n".join(["lightning_effi plan", *(f"  {line}" for line in lines)])


def format_bytes(count: float) -> str:
    """``1536`` as ``1.5 KiB``."""
    for unit in _UNITS:
        if count < 1024 or unit == _UNITS[-1]:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError("unreachable")
