"""The private names of torch, Lightning and torchmetrics that tensor parallelism relies on are there."""

from __future__ import annotations

import copy
import logging

import torch
import torch.distributed as dist
import torchmetrics
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from lightning_effi.compat import dtensor as dtensor_compat
from lightning_effi.compat import lightning as lightning_compat
from lightning_effi.compat import torch as torch_compat
from tests.harness import run_distributed


def test_strided_shards_count_as_sharded() -> None:
    assert dtensor_compat.is_sharded(_StridedShard(0, split_factor=2))
    assert dtensor_compat.is_sharded(Shard(1))
    assert not dtensor_compat.is_sharded(Replicate())


def gather() -> torch.Tensor:
    whole = torch.empty(2 * dist.get_world_size())
    torch_compat.all_gather_rows(whole, torch.full((2,), float(dist.get_rank())), dist.group.WORLD)
    return whole


def test_rows_are_gathered_in_rank_order() -> None:
    assert run_distributed(gather, 2)[1].tolist() == [0.0, 0.0, 1.0, 1.0]


def scatter() -> torch.Tensor:
    mine = torch.empty(2)
    torch_compat.reduce_scatter_rows(mine, torch.arange(4.0) + dist.get_rank(), dist.group.WORLD)
    return mine


def test_rows_are_summed_and_scattered_in_rank_order() -> None:
    first, second = run_distributed(scatter, 2)
    assert first.tolist() == [1.0, 3.0]
    assert second.tolist() == [5.0, 7.0]


def gather_two_axes() -> list[str]:
    listen_again = dtensor_compat.quiet_sequential_gathers()
    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("torch.distributed.tensor._redistribute").addHandler(handler)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tp"))
    sharded = distribute_tensor(torch.arange(8.0), mesh, [_StridedShard(0, split_factor=2), Shard(0)])
    sharded.full_tensor()
    assert heard == []
    listen_again()
    sharded.full_tensor()
    return heard


def test_torch_gives_no_advice_on_gathers_over_two_axes_while_quiet() -> None:
    assert len(run_distributed(gather_two_axes, 4)[0]) <= 1


def count_in_groups() -> tuple[float, float, bool]:
    group = [dist.new_group([0]), dist.new_group([1])][dist.get_rank()]
    module = torch.nn.ModuleDict({"total": torchmetrics.SumMetric()})
    lightning_compat.metrics_in_group(module, group)
    copied = copy.deepcopy(module)
    module["total"].update(1.0)
    alone = float(module["total"].compute())
    lightning_compat.metrics_everywhere(module)
    module["total"].update(0.0)
    return alone, float(module["total"].compute()), copied["total"].dist_sync_fn is not None


def test_metrics_add_up_over_their_group_only() -> None:
    assert run_distributed(count_in_groups, 2) == [(1.0, 2.0, True)] * 2


class Doubled(torch.nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


def test_compiled_modules_are_recognised() -> None:
    whole, in_place, forward, plain = (Doubled(2, 2) for _ in range(4))
    in_place.compile(backend="eager")
    forward.forward = torch.compile(forward.forward, backend="eager")  # type: ignore[method-assign]
    wrapped = torch.compile(whole, backend="eager")
    assert [torch_compat.is_compiled(module) for module in (wrapped, in_place, forward)] == [True] * 3
    assert not torch_compat.is_compiled(plain)
    assert torch_compat.compiled_forward(forward).__self__ is forward
