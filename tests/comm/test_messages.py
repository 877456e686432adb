"""Messages between ranks, by the shapes and groups that modules bring."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_effi.comm.broadcast import broadcast_states
from lightning_effi.comm.differentiable import gather_with_gradients
from tests.harness import run_distributed


def send_states() -> list[list[float]]:
    rank = dist.get_rank()
    alone = (torch.arange(6.0).reshape(2, 3) + rank).unsqueeze(0).transpose(0, 1)
    turned, plain, nothing = (torch.arange(6.0).reshape(2, 3) * rank).t(), torch.full((2,), float(rank)), torch.empty(0)
    broadcast_states([alone], dist.group.WORLD)
    broadcast_states([turned, plain, nothing, nothing.int()], dist.group.WORLD)
    return [alone.flatten().tolist(), turned.flatten().tolist(), plain.tolist()]


def test_states_of_any_strides_are_sent() -> None:
    for received in run_distributed(send_states, 2):
        assert received == [[0.0, 1.0, 2.0, 3.0, 4.0, 5.0], [0.0] * 6, [0.0, 0.0]]


def gather_in_pairs() -> tuple[Tensor, Tensor]:
    """Of four ranks, 1 and 3 gather from each other, and so do 0 and 2."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    rank = dist.get_rank()
    tensor = torch.tensor([float(rank), 1.0]).requires_grad_()
    gathered = gather_with_gradients(tensor, groups[rank % 2])
    (gathered * (rank + 1)).sum().backward()
    assert tensor.grad is not None
    return gathered.detach(), tensor.grad


def test_gathered_tensors_have_gradients_from_all_ranks_of_a_group() -> None:
    for rank, (gathered, gradient) in enumerate(run_distributed(gather_in_pairs, 4)):
        assert gathered.tolist() == [[float(rank % 2), 1.0], [rank % 2 + 2.0, 1.0]]
        total = (rank % 2 + 1) + (rank % 2 + 3)
        assert gradient.tolist() == [total, total]
