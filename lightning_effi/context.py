"""What every part of a run may know: who takes part, on which device, with which settings. A value, made once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from lightning_effi.compat import torch as torch_compat

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from lightning_effi.comm.ranks import RankWords
    from lightning_effi.config import EffiConfig
    from lightning_effi.layout import Layout
    from lightning_effi.precision import EffiPrecision


@dataclass(frozen=True)
class Group:
    """The ranks along some axes of the mesh, which includes this one.

    Process groups are held by name, so that ``destroy_process_group()`` after a run really ends them: one that is alive
    keeps the key-value store of the ranks alive, in which the next ``init_process_group()`` would find old addresses.

    Attributes:
        device_name: of the process group for tensors on the device; ``None`` in a run without process groups.
        control_name: of the same ranks with a backend for tensors on the CPU, and for objects.
    """

    device_name: str | None = None
    control_name: str | None = None

    @classmethod
    def of(cls, device: Any, control: Any) -> Group:
        """The ranks of two process groups."""
        return cls(device.group_name, control.group_name)

    @property
    def device(self) -> Any:
        """The process group for tensors on the device."""
        return None if self.device_name is None else torch_compat.group_named(self.device_name)

    @property
    def control(self) -> Any:
        """The process group for tensors on the CPU, and for objects."""
        return None if self.control_name is None else torch_compat.group_named(self.control_name)


@dataclass(frozen=True)
class Groups:
    """The groups that this rank belongs to.

    Attributes:
        data: ranks that work on different batches and average gradients.
        user: the same ranks, for what hooks and steps of the module send: a message that one rank sends alone must not
            be taken for one of sharding, see :mod:`lightning_effi.loop.watch`.
        tensor: ranks that hold parts of the same layers.
        pipeline: ranks that hold the stages of one pipeline, in their order.
        run: all ranks.
    """

    data: Group = Group()
    user: Group = Group()
    tensor: Group = Group()
    pipeline: Group = Group()
    run: Group = Group()


@dataclass(frozen=True)
class RunContext:
    """Made once processes run, and given to whoever works in a run; what is built later is handed on beside it.

    Attributes:
        config: what the user asked for.
        layout: the size of each axis.
        rank: of this process among all of the run.
        processes_per_node: how many processes share this machine's memory.
        device: where this process computes.
        precision: which dtype is computed with, and the loss scale.
        mesh: torch's mesh with the axes of the layout; ``None`` in a run without process groups.
        groups: who talks to whom.
        words: which ranks a word means at the moment, and whether a hook of the user's is running.
    """

    config: EffiConfig
    layout: Layout
    rank: int
    processes_per_node: int
    device: torch.device
    precision: EffiPrecision
    mesh: DeviceMesh | None
    groups: Groups
    words: RankWords

    @property
    def has_several_processes(self) -> bool:
        return self.layout.world_size > 1

    @property
    def is_first_rank(self) -> bool:
        """Whether this process is the one of the run that writes and speaks."""
        return self.rank == 0

    @property
    def data_parallel_rank(self) -> int:
        """Which of the different batches this process works on."""
        return self.layout.data_parallel_rank(self.rank)
