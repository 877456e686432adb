"""Training in micro-batches gives the numbers of the uncut batch."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.harness import (
    ADAMW_FP64,
    Training,
    WorkerError,
    assert_parity,
    make_trainer,
    run,
    run_distributed,
    run_reference,
    train_and_assert_parity,
)
from tests.models import MODELS
from tests.models.base import ExampleModule
from tests.models.gpt import GPT, Block, batches

MODELS_OF_ALL_KINDS = (
    "gpt-tied", "encoder", "llama", "gpt2", "bert", "vit-timm", "lora-gpt", "lora-peft-llama", "regressor"
)  # fmt: skip


def batches_of(model: str, rows: int) -> Callable[[int], list[Any]]:
    from pkgutil import resolve_name

    return partial(resolve_name(MODELS[model].data), rows=rows)


def training_of(model: str, microbatches: Any, rows: int = 7, **settings: Any) -> Training:
    case = MODELS[model]
    if case.missing:
        pytest.skip(f"needs {', '.join(case.missing)}")
    strategy = {"microbatches": microbatches, **settings.pop("strategy", {})}
    return Training(case.module, batches_of(model, rows), strategy=strategy, **settings)


# Stages 1 and 2 reduce alike; the window matters where gradients are kept as shards.
ON_TWO_RANKS = {(0, 1), (2, 3), (3, 1)}


@pytest.mark.parametrize("model", MODELS_OF_ALL_KINDS)
def test_micro_batches_equal_the_whole_batch(model: str) -> None:
    train_and_assert_parity(training_of(model, 3))


@pytest.mark.parametrize(
    ("zero_stage", "accumulate"),
    [
        pytest.param(*cell, marks=() if cell in ON_TWO_RANKS else pytest.mark.full)
        for cell in itertools.product(range(4), (1, 3))
    ],
)
def test_micro_batches_on_two_ranks(zero_stage: int, accumulate: int) -> None:
    training = training_of(
        "llama", 3, strategy={"zero_stage": zero_stage}, world_size=2, accumulate=accumulate, clip=0.1
    )
    train_and_assert_parity(training)


@pytest.mark.parametrize("microbatches", [1, 5, 20, *(pytest.param(n, marks=pytest.mark.full) for n in (2, 7))])
def test_any_number_of_micro_batches(microbatches: int) -> None:
    train_and_assert_parity(
        training_of("encoder", microbatches, rows=5, optimizer="adamw", precision="64-true"), ADAMW_FP64
    )


# --- what a step may do -----------------------------------------------------------------------------------------------


class SumLoss(GPT):
    def loss(self, batch: Tensor) -> Tensor:
        return F.cross_entropy(self(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten(), reduction="sum") / 100


class ManyLogs(GPT):
    """Logs a mean, a count, an extreme and a metric, and returns rows and a scalar beside the loss."""

    def __init__(self, **settings: Any) -> None:
        from torchmetrics.classification import MulticlassAccuracy

        super().__init__(**settings)
        self.accuracy = MulticlassAccuracy(17, average="micro")

    def training_step(self, batch: Tensor, batch_idx: int) -> dict[str, Any]:
        scores = self(batch[:, :-1])
        loss = F.cross_entropy(scores.flatten(0, 1), batch[:, 1:].flatten())
        self.accuracy(scores.flatten(0, 1), batch[:, 1:].flatten())
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        self.log_dict({"rows_epoch": float(len(batch)), "largest_epoch": scores.max()}, on_step=False, on_epoch=True)
        self.log("tokens_epoch", float(batch.numel()), on_step=False, on_epoch=True, reduce_fx="sum")
        return {"loss": loss, "scores": scores, "mean": scores.mean(), "kind": "train"}


class Outputs(pl.Callback):
    """Notes what ``on_train_batch_end`` is given."""

    def __init__(self) -> None:
        self.observation: list[Any] = []

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, *_: Any) -> None:
        self.observation.append((outputs["scores"].detach().clone(), float(outputs["mean"]), outputs["kind"]))


class Contrastive(GPT):
    def loss(self, batch: Tensor) -> Tensor:
        vectors = F.normalize(self.norm(self.embedding(batch).mean(1)), dim=-1)
        return F.cross_entropy(vectors @ vectors.T, torch.arange(len(batch)))


class Teacher(GPT):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.teacher = nn.Linear(16, 16)
        self.teacher.requires_grad_(False)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.teacher.weight.data.mul_(1.0)
        return self.loss(batch)


class Counting(GPT):
    seen = 0

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.seen += 1
        return self.loss(batch)


class Remembering(GPT):
    """What is only overwritten is no state that micro-batches would spoil."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.last_loss = self.loss(batch)
        return self.last_loss


class Routed(Block):
    def __init__(self, penalties: list[Tensor]) -> None:
        super().__init__(16, 4)
        self.penalties = penalties

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        self.penalties.append(x.square().mean())
        return x


class CollectsPenalties(GPT):
    """The blocks and the module share a list, as with the losses of routers."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.penalties: list[Tensor] = []
        self.blocks = nn.ModuleList(Routed(self.penalties) for _ in range(4))

    def loss(self, batch: Tensor) -> Tensor:
        self.penalties.clear()
        loss = super().loss(batch)
        assert len(self.penalties) == 4
        return loss + 0.5 * torch.stack(self.penalties).sum()


class CachesByRows(GPT):
    """A buffer of the batch's size, made anew for each other size."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.register_buffer("offsets", None, persistent=False)
        self.rows = -1

    def forward(self, tokens: Tensor) -> Tensor:
        if len(tokens) != self.rows:
            self.rows = len(tokens)
            self.offsets = torch.linspace(0, 1, 17).repeat(len(tokens), 1, 1)
        return super().forward(tokens) + self.offsets


class RenamesLogs(GPT):
    def log(self, name: str, *args: Any, **kwargs: Any) -> None:
        super().log(f"renamed_{name}", *args, **kwargs)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_step=False, on_epoch=True)
        self.log_dict({"double": 2 * loss}, on_step=False, on_epoch=True)
        return loss


class SkipsABatch(GPT):
    """Returns no loss for the second batch, as steps do that meet a bad one."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx == 1 else loss


class WithBatchNorm(GPT):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.normalize = nn.BatchNorm1d(16)

    def loss(self, batch: Tensor) -> Tensor:
        return self.normalize(self.embedding(batch).mean(1)).square().mean() + super().loss(batch)


class MaskedMean(ExampleModule):
    """Per-token loss with a mask of its own, whose sum divides it; one row has no token at all."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 1))

    def loss(self, batch: dict[str, Any]) -> Tensor:
        error = (self.layers(batch["x"]).squeeze(-1) - batch["y"]).square() * batch["mask"]
        return error.sum() / batch["mask"].sum()


def masked_batches(count: int, rows: int = 5, full_first: bool = True) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(5)
    result = []
    for index in range(count):
        lengths = torch.randint(1, 7, (rows, 1), generator=generator)
        if index == 0 and full_first:  # nothing tells the rules apart yet
            lengths.fill_(6)
        mask = (torch.arange(6) < lengths).float()
        x, y = torch.randn(rows, 6, 4, generator=generator), torch.randn(rows, 6, generator=generator)
        names = [f"row {i}" for i in range(rows)]
        result.append({"x": x, "y": y, "mask": mask, "meta": {"names": names, "k": 3}, "opt": None})
    return result


def one_row_masked(count: int) -> list[dict[str, Any]]:
    batches = masked_batches(count, full_first=False)
    for batch in batches:
        batch["mask"][2] = 0.0
    return batches


def gpt_training(module: Callable[..., Any], microbatches: Any = 3, **settings: Any) -> Training:
    return Training(module, batches_of("gpt-tied", 7), strategy={"microbatches": microbatches}, **settings)


def test_sum_loss_equals_the_whole_batch() -> None:
    train_and_assert_parity(gpt_training(SumLoss, learning_rate=0.05))


def test_rule_is_found_when_batches_tell_rules_apart() -> None:
    train_and_assert_parity(Training(MaskedMean, masked_batches, strategy={"microbatches": 3}, steps=5))


def test_piece_without_anything_to_count_does_not_count() -> None:
    train_and_assert_parity(Training(MaskedMean, one_row_masked, strategy={"microbatches": 5}))


def test_logged_values_and_outputs_equal_the_whole_batch() -> None:
    training = gpt_training(ManyLogs, callbacks=(Outputs,))
    record, reference = run(training), run_reference(training)
    assert_parity(record, reference)
    assert {key: value for key, value in record.logged.items() if "step" not in key} == pytest.approx(
        {key: value for key, value in reference.logged.items() if "step" not in key}, rel=1e-5
    )
    for ours, theirs in zip(record.observations[0][0], reference.observations[0][0], strict=True):
        torch.testing.assert_close(ours[0], theirs[0], rtol=1e-4, atol=1e-5)
        assert ours[1] == pytest.approx(theirs[1], abs=1e-5)
        assert ours[2] == theirs[2]


@pytest.mark.parametrize("module", [Remembering, CollectsPenalties, CachesByRows])
def test_what_steps_keep_is_that_of_the_whole_batch(module: type[GPT]) -> None:
    train_and_assert_parity(gpt_training(module))


@pytest.mark.parametrize("stages", [1, 2])
def test_log_of_the_modules_own(stages: int) -> None:
    training = gpt_training(RenamesLogs, world_size=stages)
    training.strategy["pipeline_parallel_size"] = stages
    record, reference = run(training), run_reference(training)
    names = {"renamed_train_loss_epoch", "renamed_loss", "renamed_double"}
    assert set(record.logged) == set(reference.logged) > names
    for name in names:
        assert record.logged[name] == pytest.approx(reference.logged[name], rel=1e-5)


def test_step_without_a_loss_moves_nothing() -> None:
    train_and_assert_parity(gpt_training(SkipsABatch, optimizer="adamw", precision="64-true", steps=4), ADAMW_FP64)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (Contrastive, "not made up of the losses of its micro-batches"),
        (Teacher, "changes 'teacher.weight'"),
        (Counting, "changes 'seen'"),
        (WithBatchNorm, "changes 'normalize.running_mean'.*LayerNorm"),
    ],
)
def test_what_would_silently_go_wrong_is_refused(module: Callable[..., Any], message: str) -> None:
    with pytest.raises(WorkerError, match=message):
        run(gpt_training(module))


class Rehearsed(GPT):
    """``early``: how often ``training_step`` ran for the first batch, besides once for each micro-batch."""

    early: int | None = None
    calls = 0  # of the class: what a rehearsed step counts on the module is put back

    def __init__(self, drops: float = 0.0, weight: float = 0.0) -> None:
        super().__init__()
        self.drops, self.weight, self.penalized = drops, weight, 0

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        Rehearsed.calls += 1
        loss = F.dropout(super().training_step(batch, batch_idx), self.drops)
        if not self.weight or not torch.is_grad_enabled():
            return loss
        self.penalized += 1
        return loss + self.weight * self.head.weight.square().sum()

    def on_train_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None:
        if self.early is None:
            self.early = Rehearsed.calls - 3


def rehearsals(zero_stage: int) -> list[tuple[int | None, int]]:
    counts = []
    for settings, weight in (({}, "auto"), ({"drops": 0.1}, "auto"), ({"weight": 0.1}, "auto"), ({}, "uniform")):
        module, Rehearsed.calls = Rehearsed(**settings), 0
        strategy = {"zero_stage": zero_stage, "microbatches": {"count": 3, "weight": weight}}
        trainer = make_trainer(strategy, 2, max_epochs=1, use_distributed_sampler=False)
        trainer.fit(module, DataLoader(batches(2, rows=6), batch_size=None))  # type: ignore[arg-type]
        counts.append((module.early, module.penalized))
    return counts


@pytest.mark.parametrize("zero_stage", [pytest.param(0, marks=pytest.mark.full), 3])
def test_steps_run_twice_before_the_first_real_one(zero_stage: int) -> None:
    """Three times where they draw numbers, six where recording gradients changes the loss; once by a fixed rule.

    What a first forward that was dropped has counted is put back: six remain, of two batches with three pieces.
    """
    assert run_distributed(rehearsals, 2, zero_stage) == [[(2, 0), (3, 0), (6, 6), (1, 0)]] * 2


def test_uniform_weights_are_taken_without_a_comparison() -> None:
    record = run(gpt_training(Contrastive, {"count": 3, "weight": "uniform"}, steps=1))
    assert len(record.losses) == 1


def quarter_weights(pieces: list[Tensor]) -> list[float]:
    return [len(piece) / 28 for piece in pieces]


def test_weights_of_ones_own() -> None:
    weight = f"{__name__}:quarter_weights"
    record = run(gpt_training(GPT, {"count": 3, "weight": weight}, steps=1))
    reference = run_reference(gpt_training(GPT, steps=1))
    assert record.losses[0] == pytest.approx(reference.losses[0] / 4)


def two_halves(batch: Tensor, count: int) -> list[Tensor]:
    return [batch[:4], batch[4:]]


def test_splitter_of_ones_own() -> None:
    train_and_assert_parity(gpt_training(GPT, {"count": 2, "splitter": f"{__name__}:two_halves"}))
