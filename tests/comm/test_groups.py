"""Groups of some ranks: made once for all runs in a process, and ended with the default group."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lightning_effi.comm.groups import group_of
from lightning_effi.compat.torch import group_named
from tests.harness import run_distributed


def make_twice() -> tuple[Any, ...]:
    timeout = timedelta(seconds=20)
    names = [group_of(ranks, timeout) for ranks in ([0], [1], [0, 1], [0], [0, 1])]
    total = torch.tensor(float(dist.get_rank() + 1))
    dist.all_reduce(total, group=group_named(names[2] or ""))
    return [name is not None for name in names], names[0] == names[3], names[2] == names[4], float(total)


def test_further_runs_are_given_the_groups_of_the_first() -> None:
    first, second = run_distributed(make_twice, 2, fresh=True)
    assert first == ([True, False, True, True, True], True, True, 3.0)
    assert second == ([False, True, True, False, True], True, True, 3.0)
