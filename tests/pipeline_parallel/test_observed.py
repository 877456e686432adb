"""One run of the whole module is observed; stages go on with its values, and nothing real is made of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_effi.pipeline_parallel.origins import StandInWatch
from lightning_effi.pipeline_parallel.stand_ins import Enter, MetaTree, StandIns, leaf_like, stands_behind
from tests.harness import (
    Training,
    WorkerError,
    make_trainer,
    run,
    run_distributed,
    run_isolated,
    train_and_assert_parity,
)
from tests.models.gpt import GPT, Block, batches

STAGES = {"pipeline_parallel_size": 2, "microbatches": 2}


def pipelined(module: Callable[..., Any], **settings: Any) -> Training:
    return Training(module, partial(batches, rows=6), strategy=STAGES, world_size=2, timeout=60.0, **settings)


# -- how often the step runs -------------------------------------------------------------------------------------------


class Counted(GPT):
    calls: list[int] = []  # noqa: RUF012  shared on purpose: an attribute would be state of the module

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.calls.append(len(batch))
        return super().training_step(batch, batch_idx)


def calls_in_the_first_step(strategy: dict[str, Any], world_size: int) -> int:
    Counted.calls.clear()
    trainer = make_trainer(strategy, world_size, max_steps=1)
    trainer.fit(Counted(), DataLoader(batches(1, rows=4)[0], batch_size=4))  # type: ignore[arg-type]
    return len(Counted.calls)


def test_steps_before_the_first_one() -> None:
    """At most four, of which one observes, two weigh the pieces, and one is the stages'."""
    for calls in run_distributed(calls_in_the_first_step, 2, STAGES, 2):
        assert calls - 2 <= 4
    [calls] = run_distributed(calls_in_the_first_step, 1, {"microbatches": 2}, 1)
    assert calls - 2 <= 3
    assert run_distributed(calls_in_the_first_step, 1, {"zero_stage": 2}, 1) == [1]


# -- plausible values --------------------------------------------------------------------------------------------------


class Distributional(GPT):
    """Its head makes parameters of a distribution, and guards stand between its blocks."""

    def loss(self, batch: Tensor) -> Tensor:
        x = self.embedding(batch[:, :-1]) + self.positions
        for block in self.blocks:
            x = block(x)
            if torch.isnan(x).any() or not bool(x.isfinite().all()):
                raise ValueError("the hidden states are not finite")
            torch.distributions.Normal(x, x.square().mean() + 0.1)  # checks its arguments
        scores = self.head(self.norm(x))
        freedom, location, scale = 2 + F.softplus(scores[..., 0]), scores[..., 1], F.softplus(scores[..., 2])
        return -torch.distributions.StudentT(freedom, location, scale).log_prob(batch[:, 1:] / 17).mean()


class ChoosesItsLength(GPT):
    """A curriculum: batches have one shape, what crosses the stages has another in every step."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return super().training_step(batch[:, : 5 + 3 * (batch_idx % 3)], batch_idx)


@pytest.mark.parametrize("module", [Distributional, ChoosesItsLength])
def test_steps_are_those_of_one_process(module: type[GPT]) -> None:
    train_and_assert_parity(pipelined(module, precision="64-true"))


def test_stand_ins_have_observed_values_in_any_shape() -> None:
    module = nn.Linear(3, 2)
    stand_ins, given = StandIns({"unit": module}), torch.randn(2, 3)
    made = module(given).softmax(-1)
    stand_ins.observe("unit", MetaTree.of(((given,), {})), (made, []))
    for rows in (2, 5):
        output, left = stand_ins.make("unit", MetaTree.of(((torch.empty(rows, 3),), {})), [])
        assert output.shape == (rows, 2)
        assert torch.equal(output, made.repeat(3, 1)[:rows])
        assert left == []
    stand_ins.perturbed = True
    assert not torch.equal(stand_ins.make("unit", MetaTree.of(((given,), {})), [])[0], made)


# -- what goes around a stage ------------------------------------------------------------------------------------------


class SharesAList(GPT):
    class Block(Block):
        def __init__(self, penalties: list[Tensor]) -> None:
            super().__init__(16, 4)
            self.penalties = penalties

        def forward(self, x: Tensor) -> Tensor:
            x = super().forward(x)
            self.penalties.append(x.square().mean())
            return x

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.penalties: list[Tensor] = []
        self.blocks = nn.ModuleList(SharesAList.Block(self.penalties) for _ in range(4))

    def loss(self, batch: Tensor) -> Tensor:
        self.penalties.clear()
        loss = super().loss(batch)
        return loss + torch.stack(self.penalties).sum()


class OnlyCollects(SharesAList):
    def loss(self, batch: Tensor) -> Tensor:
        self.penalties.clear()
        loss = GPT.loss(self, batch)
        assert len(self.penalties) == 4
        return loss + self.penalties[-1]


class WritesIntoABuffer(GPT):
    """The detour is detached, written in place, and read as a number."""

    def loss(self, batch: Tensor) -> Tensor:
        x = self.embedding(batch[:, :-1]) + self.positions
        kept = torch.zeros(4)
        for index, block in enumerate(self.blocks):
            x = block(x)
            kept[index] = x.detach().mean()
        scores = self.head(self.norm(x))
        return F.cross_entropy(scores.flatten(0, 1), batch[:, 1:].flatten()) + kept.sum()


class DecidesLater(GPT):
    """What the first batch does not show is an error when it happens."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.positions[: tokens.shape[1]]
        early = self.blocks[0](x)
        x = early
        for block in list(self.blocks)[1:]:
            x = block(x)
        scores = self.head(self.norm(x))
        return scores + early.mean().detach() if self.trainer.global_step else scores


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (SharesAList, r"attribute 'penalties' of 'blocks\.0' computed before 'blocks\.2' is used.*torch\.stack"),
        (WritesIntoABuffer, r"before 'blocks\.2' is used after it by .*\(test_observed\.py:\d+, in loss"),
        (DecidesLater, r"what the step returns depends on a value that 'blocks\.0' computes on another stage"),
    ],
)
def test_values_around_a_stage_are_refused_by_name(module: type[GPT], message: str) -> None:
    with pytest.raises(WorkerError, match=message):
        run(pipelined(module))


def test_list_of_which_only_the_last_stages_part_is_used() -> None:
    train_and_assert_parity(pipelined(OnlyCollects))


def test_watch_follows_stand_ins_through_every_function() -> None:
    watch, stand_in, buffer, known = StandInWatch(), torch.ones(3), torch.zeros(2, 3), torch.ones(3)
    watch.mark(stand_in, "block")
    with watch:
        buffer[0].copy_(stand_in.detach() * 2)
        assert watch.source(stand_in.data + known) == watch.source(torch.cat([known, stand_in])) == "block"
        assert watch.source(buffer) == watch.source(buffer.sum()) == "block"
        assert watch.source(known * 2, [torch.ones_like(known)]) is None
        assert torch.isnan(torch.tensor(stand_in.sum().item()))
        assert not torch.isnan(stand_in).any()  # a guard may ask
        with pytest.raises(RuntimeError, match=r"'block' computes on another stage is decided by .*test_observed\.py"):
            bool(stand_in.sum() > 0)


def test_stand_ins_are_found_in_a_graph() -> None:
    leaf = leaf_like(torch.ones(2))
    leaf._effi_stands_for = "block"  # type: ignore[attr-defined]
    weight = torch.ones(2, requires_grad=True)
    assert stands_behind([weight * 2 + Enter.apply(leaf, torch.ones(2)).sum()]) == "block"
    assert stands_behind([weight * 2]) is None


# -- evaluation --------------------------------------------------------------------------------------------------------


class Evaluates(GPT):
    """Two views of a batch, early values used late, decisions, weights used by hand, tokens drawn one by one."""

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        scores = self(batch[:, :-1])
        again = self(batch[:, :-1].flip(0))
        self.log("two", (scores - again.flip(0)).abs().max() + F.cross_entropy(scores.mT, batch[:, 1:]))
        start = x = self.embedding(batch[:, :-1]) + self.positions
        for block in self.blocks:
            x = block(x)
        if x.mean() > start.mean() + 100:
            raise AssertionError
        self.log("late", F.linear(self.norm(x) + start, self.head.weight).square().mean())
        self.log("weights", self.norm.weight.square().sum() + self.blocks[0].norm1.weight.sum())
        tokens = batch[:, :3]
        for _ in range(4):
            tokens = torch.cat([tokens, self(tokens)[:, -1:].argmax(-1)], 1)
        self.log("tokens", tokens.float().mean())


class CollectsByHooks(GPT):
    """Each rank collects what its own blocks return."""

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        found: list[Tensor] = []
        hooks = [block.register_forward_hook(lambda *given: found.append(given[2])) for block in self.blocks]
        self(batch[:, :-1])
        for hook in hooks:
            hook.remove()
        self.log("first", found[0].mean())


def test_values_that_hooks_collect_are_refused_where_ranks_run_a_step_together() -> None:
    with pytest.raises(WorkerError, match=r"look at different values \(test_observed\.py:\d+, in validation_step"):
        run_distributed(evaluate, 2, CollectsByHooks, STAGES, 2)


class Once(GPT):
    """Goes through the stages one after the other from its second batch on."""

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("once", self.loss(batch))


def evaluate(module: type[GPT], strategy: Any, world_size: int) -> dict[str, float]:
    pl.seed_everything(3, verbose=False)
    data = DataLoader(batches(1, rows=10, seed=2)[0], batch_size=4)  # type: ignore[arg-type]
    trainer = make_trainer(strategy, world_size, max_epochs=1, barebones=False, use_distributed_sampler=False)
    trainer.fit(module(), data, data)
    return {key: float(value) for key, value in trainer.callback_metrics.items()}


@pytest.mark.parametrize("module", [Evaluates, Once])
def test_evaluation_is_that_of_one_process(module: type[GPT]) -> None:
    expected = run_isolated(evaluate, module, None, 1)
    for found in run_distributed(evaluate, 2, module, STAGES, 2):
        assert found == pytest.approx(expected, rel=1e-4)
