"""Choose the engine for a plan."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_effi.data_parallel.engine import Engine
from lightning_effi.data_parallel.plan import ShardingPlan
from lightning_effi.data_parallel.replicated import ReplicatedEngine
from lightning_effi.data_parallel.sharded import ShardedEngine
from lightning_effi.modules.deferred import DeferredValues


def build_engine(
    module: nn.Module,
    plan: ShardingPlan,
    *,
    mesh: Any,
    data_parallel_group: dist.ProcessGroup,
    control_group: dist.ProcessGroup,
    device: torch.device,
    sync_every_backward: bool,
    processes_per_node: int,
) -> Engine:
    """Put ``module`` on ``device`` as the plan says, with equal values on all ranks."""
    if plan.is_sharded:
        return ShardedEngine(
            module,
            plan,
            mesh=mesh,
            data_parallel_group=data_parallel_group,
            control_group=control_group,
            device=device,
            sync_every_backward=sync_every_backward,
            processes_per_node=processes_per_node,
        )
    if plan.layout.data_parallel_size > 1:
        return ReplicatedEngine(
            module, group=data_parallel_group, device=device, sync_every_backward=sync_every_backward
        )
    DeferredValues(module).fill_through(module)
    module.to(device)
    return Engine(module)
