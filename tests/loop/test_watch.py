"""Ranks that wait for each other are told so within seconds, with the lines; one that waits for a slow rank is not."""

from __future__ import annotations

import os
import time
import warnings
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_effi.compat.torch import Message
from lightning_effi.loop import watch
from lightning_effi.loop.deadlock import Standing, deadlock, sentence
from tests.harness import make_trainer, run_distributed

INTERVAL = 0.05
SLOW = INTERVAL * 20  # far beyond the patience of the watch


def refuse(module: nn.Module, args: Any) -> None:
    raise LookupError("no such class")


class Lonely(pl.LightningModule):
    """In the third batch, one rank does something alone; before that, one is slow."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(4))
        self.head = nn.Linear(8, 3)

    def alone(self, fault: str, rank: int) -> bool:
        return self.fault == fault and self.global_rank == rank and self.trainer.global_step == 2

    def refuse_in(self, fault: str) -> None:
        if self.fault == fault and self.trainer.strategy.context.rank == 1:
            refuse(self, ())

    def training_step(self, x: Tensor, batch_idx: int) -> Tensor:
        self.refuse_in("first batch")
        for block in self.blocks[: 2 if self.alone("skipped blocks", 1) else 4]:
            x = block(x)
        return self.head(x).pow(2).mean()

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self.alone("norm", 1):
            self.blocks[0][0].weight.grad.norm().item()  # type: ignore[index, union-attr]

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1 and self.global_rank == 0:
            time.sleep(SLOW)
        if self.alone("error", 0):
            self.blocks[0].register_forward_pre_hook(refuse)  # type: ignore[union-attr]
        if self.alone("last stage", 1):
            self.blocks[-1].register_forward_pre_hook(refuse)  # type: ignore[union-attr]
        if self.alone("gather", 0):
            self.all_gather(batch[0])
        if self.alone("reduce", 1):
            dist.all_reduce(batch[:, 0])
        if self.alone("state", 0):
            self.trainer.strategy.lightning_module_state_dict()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        self.refuse_in("set-up")
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit_until_it_ends(fault: str, strategy: dict[str, Any]) -> tuple[int, str]:
    """The steps that were done, and what the run ended with."""
    watch._INTERVAL = INTERVAL
    trainer = make_trainer(strategy, 2, max_steps=4)
    try:
        trainer.fit(Lonely(fault), DataLoader(torch.randn(64, 8), batch_size=4))
    except (RuntimeError, LookupError, ValueError) as error:
        return trainer.global_step, str(error)
    return trainer.global_step, ""


@pytest.mark.parametrize(
    ("fault", "line", "strategy"),
    [
        ("norm", ".grad.norm().item()", {"zero_stage": 2}),
        ("skipped blocks", "x = block(x)", {"zero_stage": 3}),
        ("gather", "self.all_gather(batch[0])", {"zero_stage": 3}),
        pytest.param("reduce", "dist.all_reduce(batch[:, 0])", {"zero_stage": 3}, marks=pytest.mark.full),
        pytest.param("norm", ".grad.norm().item()", {"tensor_parallel_size": 2}, marks=pytest.mark.full),
        pytest.param("state", ".lightning_module_state_dict()", {"zero_stage": 3}, marks=pytest.mark.full),
        pytest.param("state", ".lightning_module_state_dict()", {"pipeline_parallel_size": 2}, marks=pytest.mark.full),
    ],
    ids=["norm-zero2", "skipped-zero3", "gather-zero3", "reduce-zero3", "norm-tp2", "state-zero3", "state-pp2"],
)
def test_wait_of_one_rank_alone_is_an_error_with_its_line_on_all_ranks(
    fault: str, line: str, strategy: dict[str, Any]
) -> None:
    for steps, message in run_distributed(fit_until_it_ends, 2, fault, strategy):
        assert steps >= 2  # also the slow one
        assert "ranks wait for each other" in message
        assert line in message
        assert "test_watch.py" in message


@pytest.mark.parametrize(
    ("fault", "rank", "strategy"),
    [
        ("last stage", 1, {"pipeline_parallel_size": 2}),
        pytest.param("error", 0, {"pipeline_parallel_size": 2}, marks=pytest.mark.full),
        pytest.param("error", 0, {"zero_stage": 3}, marks=pytest.mark.full),
        pytest.param("first batch", 1, {"tensor_parallel_size": 2}, marks=pytest.mark.full),
        pytest.param("set-up", 1, {"zero_stage": 3}, marks=pytest.mark.full),
    ],
    ids=["last-pp2", "first-pp2", "zero3", "first-batch-tp2", "set-up-zero3"],
)
def test_an_error_of_one_rank_reaches_the_others_where_processes_live_on(
    fault: str, rank: int, strategy: dict[str, Any]
) -> None:
    ended = [message for _, message in run_distributed(fit_until_it_ends, 2, fault, strategy)]
    assert ended[rank] == "no such class"
    assert f"rank {rank} has ended its run in LookupError: no such class (test_watch.py" in ended[1 - rank]


def fit_without_records() -> list[str]:
    with mock.patch.dict(os.environ, TORCH_FR_BUFFER_SIZE="0"), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert fit_until_it_ends("nothing", {"zero_stage": 0}) == (4, "")
    return [str(warning.message) for warning in told]


def test_it_is_said_once_where_nobody_watches() -> None:
    told, elsewhere = run_distributed(fit_without_records, 2)
    assert len([text for text in told if "TORCH_FR_BUFFER_SIZE=0" in text]) == 1
    assert not any("TORCH_FR_BUFFER_SIZE" in text for text in elsewhere)


# -- what contradicts --------------------------------------------------------------------------------------------------


def standing(entered: dict[str, int], *under_way: tuple[str, int, str, int], **other: Any) -> Standing:
    members = {group: [0, 1, 2] for group in "ABC"}
    messages = [Message(*message, is_open=True) for message in under_way]
    return Standing(1, entered, members, messages, other.pop("awaits", None), "", **other)


WAITS_IN_A = standing({"A": 5, "B": 1}, ("A", 5, "all_reduce", 4))


@pytest.mark.parametrize(
    ("other", "found"),
    [
        (
            standing({"A": 4, "B": 2}, ("B", 2, "all_reduce", 4)),
            (0, 1),
        ),  # each in a message that the other has not seen
        (standing({"A": 4, "B": 1}), None),  # slow
        (standing({"B": 2}, ("B", 2, "all_reduce", 4)), None),  # it is not known where it is in A
        (standing({"A": 4, "B": 1}, ("A", 4, "all_reduce", 4)), None),  # behind, and waits for somebody else
        (standing({"A": 5, "B": 1}, ("A", 5, "all_reduce", 4)), None),  # in the same message
        (standing({"A": 5, "B": 1}, ("A", 5, "all_gather", 4)), (0, 1)),
        (standing({"A": 5, "B": 1}, ("A", 5, "all_reduce", 8)), (0, 1)),
        (standing({"A": 4, "B": 1}, awaits=0), (0, 1)),
        (standing({"A": 4, "B": 1}, has_ended=True), (0, 1)),
        (standing({"A": 5, "B": 1}, has_ended=True), None),
    ],
)
def test_ranks_wait_for_each_other_only_where_none_can_go_on(other: Standing, found: tuple[int, ...] | None) -> None:
    standings = {0: WAITS_IN_A, 1: Standing.of(other.noted())}
    assert deadlock(standings) == found
    if found:
        assert "rank 0 waits in all_reduce; rank 1" in sentence(found, standings, {})


def test_circles_of_three_are_found_and_chains_are_not() -> None:
    circle = {
        0: standing({"A": 1, "C": 0}, ("A", 1, "broadcast", 1))._replace(members={"A": [0, 1]}),
        1: standing({"A": 0}, awaits=2),
        2: standing({"C": 1}, ("C", 1, "all_gather", 1))._replace(members={"C": [2, 0]}),
    }
    assert deadlock(circle) == (0, 1, 2)
    assert deadlock({rank: circle[rank] for rank in (0, 1)}) is None


def test_place_where_ranks_parted_is_named() -> None:
    together = Message("A", 1, "all_gather", 8, False, " (a.py:1)")
    mine = [together, Message("A", 2, "all_gather", 8, False, " (a.py:2)"), Message("A", 3, "all_gather", 8, True)]
    theirs = [together, Message("A", 2, "all_gather", 8, False, " (in backward)"), Message("B", 9, "barrier", 1, True)]
    standings = {
        0: standing({"A": 3, "B": 8})._replace(messages=mine[2:]),
        1: standing({"A": 2, "B": 9})._replace(messages=theirs[2:]),
    }
    found = deadlock(standings)
    assert found == (0, 1)
    said = "rank 0 came to all_gather (a.py:2) when rank 1 came to all_gather (in backward)"
    assert said in sentence(found, standings, {0: mine, 1: theirs})
