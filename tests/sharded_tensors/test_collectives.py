"""Collectives that a module's hooks call on parameters and gradients, as scripts for DistributedDataParallel do."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_effi.compat import torch as torch_compat
from tests.harness import WorkerError
from tests.harness.fitting import Fit, fit
from tests.harness.several_fits import assert_outcomes_equal, fit_several, single_processes
from tests.models.gpt import GPT, batches
from tests.sharded_tensors.test_user_code_on_shards import Untied


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


class Synchronises(Untied):
    """Averages gradients and sends weights in every way that leaves equal replicas as they are."""

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        if not dist.is_initialized():
            return
        size = dist.get_world_size()
        for parameter in self.blocks.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= size  # type: ignore[operator]
        head, table, norm = self.head.weight, self.embedding.weight, self.norm.weight
        assert head.grad is not None
        assert table.grad is not None
        assert norm.grad is not None
        dist.all_reduce(head.grad.data)
        head.grad.div_(size)
        work = dist.all_reduce(table.grad, async_op=True)
        work.wait()
        table.grad.mul_(1 / size)
        dist.all_reduce(norm.grad, op=dist.ReduceOp.MAX)
        dist.all_reduce(head.grad[3])
        head.grad[3] /= size
        dist.broadcast(norm.grad, src=size - 1)

    @torch.no_grad()
    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        if not dist.is_initialized():
            return
        for parameter in self.parameters():
            dist.broadcast(parameter.data, src=0)
        self.gathers(self.hidden.weight)
        flat = nn.utils.parameters_to_vector(self.parameters())
        dist.all_reduce(flat)
        nn.utils.vector_to_parameters(flat / dist.get_world_size(), self.parameters())

    def gathers(self, weight: Tensor) -> None:
        expected, size = whole(weight), dist.get_world_size()
        outputs = [torch.empty_like(weight) for _ in range(size)]
        dist.all_gather(outputs, weight.detach())
        plain = [torch.empty(weight.shape, dtype=weight.dtype) for _ in range(size)]
        dist.all_gather(plain, weight.detach())
        assert all(torch.equal(whole(output), expected) for output in [*outputs, *plain])
        rows = torch.empty(len(expected) // size, *expected.shape[1:], dtype=weight.dtype)
        torch_compat.reduce_scatter_rows(rows, weight.detach(), dist.group.WORLD)
        assert torch.equal(rows, expected.chunk(size)[dist.get_rank()] * size)
        total = expected * size
        to_first = weight.detach().clone()
        if hasattr(weight, "device_mesh"):  # tensor parallelism splits in the first step
            with pytest.raises(RuntimeError, match="other values on each rank"):
                dist.reduce(to_first, dst=0)
        dist.reduce(plain[0], dst=0)
        assert dist.get_rank() != 0 or torch.equal(plain[0], total)

    def on_train_end(self) -> None:
        strategy = self.trainer.strategy
        assert torch.equal(whole(strategy.reduce(self.head.weight.detach(), reduce_op="mean")), whole(self.head.weight))
        assert torch.equal(whole(strategy.broadcast(self.head.weight.detach(), 0)), whole(self.head.weight))


LAYOUTS = {
    "zero1": {"zero_stage": 1},
    "zero2": {"zero_stage": 2},
    "zero3": {"zero_stage": 3},
    "tp2": {"zero_stage": 0, "tensor_parallel_size": 2},
}


def test_replicas_that_are_equal_stay_so() -> None:
    runs = {name: Fit(Synchronises, partial(batches, 2), layout) for name, layout in LAYOUTS.items()}
    expected = single_processes(runs)
    for name, outcomes in fit_several(runs).items():
        assert_outcomes_equal(outcomes, expected[name])


class ReducesToOne(Untied):
    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        dist.reduce(self.head.weight.grad, dst=0)


def test_what_would_leave_ranks_with_different_values_is_refused() -> None:
    module: type[GPT] = ReducesToOne
    with pytest.raises(WorkerError, match="reduce would write into a parameter or gradient that is sharded"):
        fit(Fit(module, partial(batches, 1), {"zero_stage": 2}))
