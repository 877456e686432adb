"""Lightning's view of a worker: the processes exist already, and so does their process group."""

from __future__ import annotations

import torch.distributed as dist
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from typing_extensions import override


class WorkerEnvironment(ClusterEnvironment):
    """Lets ``Trainer(plugins=[WorkerEnvironment()])`` run inside :func:`~tests.harness.run_distributed`."""

    @property
    @override
    def creates_processes_externally(self) -> bool:
        return True

    @property
    @override
    def main_address(self) -> str:
        raise RuntimeError("a worker's process group exists already; nobody should look for a rendezvous")

    @property
    @override
    def main_port(self) -> int:
        raise RuntimeError("a worker's process group exists already; nobody should look for a rendezvous")

    @staticmethod
    @override
    def detect() -> bool:
        return False

    @override
    def world_size(self) -> int:
        return dist.get_world_size()

    @override
    def set_world_size(self, size: int) -> None:
        if size != dist.get_world_size():
            raise ValueError(f"the Trainer wants {size} processes, but the job runs on {dist.get_world_size()}")

    @override
    def global_rank(self) -> int:
        return dist.get_rank()

    @override
    def set_global_rank(self, rank: int) -> None:
        if rank != dist.get_rank():
            raise ValueError(f"the Trainer takes this process for rank {rank}, but it is rank {dist.get_rank()}")

    @override
    def local_rank(self) -> int:
        return dist.get_rank()

    @override
    def node_rank(self) -> int:
        return 0
