"""Ranks and mesh axes: which rank holds which coordinate, and who works on the same batch.

The axes are ordered (pipeline, replicate, shard, tensor), the last one fastest, so that the ranks of one
tensor-parallel group are neighbours and fall into one node. A layout is a value: it needs no process group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from lightning_effi.compat import torch as torch_compat

if TYPE_CHECKING:
    from datetime import timedelta

    from torch.distributed.device_mesh import DeviceMesh

AXES = ("pp", "replicate", "shard", "tp")


class Coordinates(NamedTuple):
    """A rank's place on each axis."""

    pp: int
    replicate: int
    shard: int
    tp: int


@dataclass(frozen=True)
class Layout:
    """The size of each axis. ``world_size = pipeline * replicate * shard * tensor``."""

    pipeline: int = 1
    replicate: int = 1
    shard: int = 1
    tensor: int = 1

    @classmethod
    def resolve(
        cls,
        world_size: int,
        *,
        zero_stage: int,
        data_parallel_size: int | Literal["auto"] = "auto",
        replicate_size: int = 1,
        tensor_parallel_size: int = 1,
        pipeline_parallel_size: int = 1,
    ) -> Layout:
        """Fit the requested sizes into ``world_size`` processes.

        Raises:
            ValueError: naming every size that does not fit, all at once.
        """
        model_parallel = tensor_parallel_size * pipeline_parallel_size
        problems = []
        if world_size % model_parallel:
            problems.append(
                f"tensor_parallel_size={tensor_parallel_size} x pipeline_parallel_size={pipeline_parallel_size}"
                f" = {model_parallel} does not divide the {world_size} processes (devices x num_nodes)"
            )
        data_parallel = max(world_size // model_parallel, 1)
        if data_parallel_size not in ("auto", data_parallel):
            problems.append(
                f"data_parallel_size={data_parallel_size} does not fit: {world_size} processes /"
                f' {model_parallel} per replica leave {data_parallel}. Use data_parallel_size="auto" or'
                f" {data_parallel}, or start {data_parallel_size * model_parallel} processes"
            )
        if data_parallel % replicate_size:
            divisors = [n for n in range(1, data_parallel + 1) if data_parallel % n == 0]
            problems.append(
                f"replicate_size={replicate_size} does not divide the data-parallel size {data_parallel};"
                f" it can be {', '.join(map(str, divisors))}"
            )
        if problems:
            raise ValueError("EffiStrategy's sizes do not fit the world: " + "; ".join(problems))
        if zero_stage == 0:
            return cls(pipeline_parallel_size, data_parallel, 1, tensor_parallel_size)
        shard = data_parallel // replicate_size
        return cls(pipeline_parallel_size, replicate_size, shard, tensor_parallel_size)

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Axis sizes in the order of :data:`AXES`."""
        return (self.pipeline, self.replicate, self.shard, self.tensor)

    @property
    def world_size(self) -> int:
        return self.pipeline * self.replicate * self.shard * self.tensor

    @property
    def data_parallel_size(self) -> int:
        """How many different batches are worked on at once."""
        return self.replicate * self.shard

    def coordinates(self, rank: int) -> Coordinates:
        """The place of ``rank`` on each axis."""
        places = []
        for size in reversed(self.sizes):
            rank, place = divmod(rank, size)
            places.append(place)
        return Coordinates(*reversed(places))

    def rank_at(self, coordinates: Coordinates) -> int:
        """The rank at the given place; the inverse of :meth:`coordinates`."""
        rank = 0
        for size, place in zip(self.sizes, coordinates, strict=True):
            rank = rank * size + place
        return rank

    def data_parallel_rank(self, rank: int) -> int:
        """Which of the ``data_parallel_size`` batches this rank works on."""
        place = self.coordinates(rank)
        return place.replicate * self.shard + place.shard

    def same_batch(self, rank: int) -> tuple[int, ...]:
        """All ranks that load the same batch as ``rank``."""
        mine = self.data_parallel_rank(rank)
        return tuple(other for other in range(self.world_size) if self.data_parallel_rank(other) == mine)

    def pipelines(self) -> list[list[int]]:
        """The ranks of each pipeline, in the order of stages."""
        starts = [place for place in map(self.coordinates, range(self.world_size)) if place.pp == 0]
        return [[self.rank_at(place._replace(pp=stage)) for stage in range(self.pipeline)] for place in starts]

    def device_mesh(self, device_type: str, apart: timedelta | None = None) -> DeviceMesh:
        """The torch mesh with the axes named as in :data:`AXES`; needs a process group.

        Args:
            device_type: of the run.
            apart: the timeout of groups of gloo, of which none is the default group; ``None`` leaves them to torch.
        """
        from torch.distributed.device_mesh import init_device_mesh

        if apart is not None:
            return torch_compat.mesh_apart(device_type, self.sizes, AXES, apart)
        return init_device_mesh(device_type, self.sizes, mesh_dim_names=AXES)

    def __str__(self) -> str:
        parts = [f"{name} {size}" for name, size in zip(AXES, self.sizes, strict=True) if size > 1]
        return " x ".join(parts) if parts else "one process"
