"""Rules of loss weights are watched after the first batch: gradients are right, or the run ends before an update."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_effi.microbatches.evidence import LossEvidence, Reduction, evidence_of
from lightning_effi.microbatches.rule_watch import RuleWatch
from tests.harness import BatchList, make_trainer, run_distributed

PAD, ROWS, LENGTH, VOCABULARY = 1, 4, 8, 11
Loss = Callable[["Tokens", Tensor, Tensor], Tensor]


class Tokens(pl.LightningModule):
    """Predicts each token from itself; ``loss`` of logits ``[rows, positions, vocabulary]`` and their tokens."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(6, VOCABULARY)
        self.loss = loss
        self.gradients: list[dict[str, Tensor]] = []

    def training_step(self, tokens: Tensor, index: int) -> Tensor:
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.loss(self, self.head(hidden), tokens)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.gradients.append({name: p.grad.clone() for name, p in self.named_parameters() if p.grad is not None})

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def batches(*padded_rows: int) -> list[Tensor]:
    """Whole batches, the first rows of which are padded after three tokens."""
    generator = torch.Generator().manual_seed(3)
    made = [torch.randint(2, VOCABULARY, (ROWS, LENGTH), generator=generator) for _ in padded_rows]
    for batch, rows in zip(made, padded_rows, strict=True):
        batch[:rows, 3:] = PAD
    return made


def train(loss: Loss, data: list[Tensor], **strategy: Any) -> Tokens:
    module = Tokens(loss)
    trainer = make_trainer(strategy or None, 1, max_epochs=1, precision="64-true")
    trainer.fit(module, torch.utils.data.DataLoader(BatchList(data), batch_size=None))
    return module


def flat(logits: Tensor, tokens: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), tokens.flatten(), **options)


def padding_ignored(module: Tokens, logits: Tensor, tokens: Tensor) -> Tensor:
    return flat(logits, tokens, ignore_index=PAD)


def padding_ignored_and_smoothed(module: Tokens, logits: Tensor, tokens: Tensor) -> Tensor:
    return flat(logits, tokens, ignore_index=PAD, label_smoothing=0.1)


def padding_masked(module: Tokens, logits: Tensor, tokens: Tensor) -> Tensor:
    mask = tokens != PAD
    return (flat(logits, tokens, reduction="none").view_as(tokens) * mask).sum() / mask.sum().clamp(min=1)


def padding_left_out(module: Tokens, logits: Tensor, tokens: Tensor) -> Tensor:
    return flat(logits, tokens, reduction="none")[tokens.flatten() != PAD].mean()


def padding_relabelled(module: Tokens, logits: Tensor, tokens: Tensor) -> Tensor:
    return flat(logits, tokens.masked_fill(tokens.eq(PAD), -100)) * 0.5


def with_penalty(module: Tokens, logits: Tensor, tokens: Tensor) -> Tensor:
    return padding_ignored(module, logits, tokens) + 1e-2 * module.head.weight.pow(2).sum()


def row_by_row(module: Tokens, logits: Tensor, tokens: Tensor) -> Tensor:
    """A mean over rows of means over their lengths: each row is divided by a number of its own, and samples weigh."""
    rows = [flat(logits[i : i + 1], tokens[i : i + 1], ignore_index=PAD) for i in range(len(tokens))]
    return sum(rows[1:], rows[0]) / len(rows)


def root_of_the_mean_where_padded(module: Tokens, logits: Tensor, tokens: Tensor) -> Tensor:
    mean = flat(logits, tokens)
    return mean.sqrt() if bool((tokens < 2).any()) else mean


def contrastive_where_padded(module: Tokens, logits: Tensor, tokens: Tensor) -> Tensor:
    if not bool((tokens < 2).any()):
        return flat(logits, tokens)
    pooled = logits.mean(1)
    return F.cross_entropy(pooled @ pooled.T, torch.arange(len(pooled)))


def longer_than_a_threshold(module: Tokens, logits: Tensor, tokens: Tensor) -> Tensor:
    """Divided by a count that no rule knows: entries above a number."""
    mask = tokens > PAD
    return (flat(logits, tokens, reduction="none").view_as(tokens) * mask).sum() / mask.sum()


RIGHT = (
    padding_ignored, padding_ignored_and_smoothed, padding_masked, padding_left_out, padding_relabelled, with_penalty,
    row_by_row,
)  # fmt: skip
REFUSED = (root_of_the_mean_where_padded, contrastive_where_padded, longer_than_a_threshold)


def errors_of_padded_batches() -> dict[str, float]:
    """The largest deviation of a gradient from that of the uncut batch, by the name of the loss."""
    found = {}
    for loss in RIGHT:
        data = batches(0, 1, 0, 3, 2)
        ours, theirs = train(loss, data, microbatches=2), train(loss, data)
        pairs = zip(ours.gradients, theirs.gradients, strict=True)
        found[loss.__name__] = max(float((a[name] - b[name]).abs().max()) for a, b in pairs for name in b)
    return found


def test_batches_with_padding_after_one_without_have_the_gradients_of_the_uncut_batch() -> None:
    [errors] = run_distributed(errors_of_padded_batches, 1)
    assert set(errors) == {loss.__name__ for loss in RIGHT}
    assert {name: error for name, error in errors.items() if not error <= 1e-12} == {}


def updates_and_messages() -> dict[str, tuple[int, str]]:
    found = {}
    for loss in REFUSED:
        module = Tokens(loss)
        trainer = make_trainer({"microbatches": 2}, 1, max_epochs=1)
        with pytest.raises(RuntimeError) as refusal:
            trainer.fit(module, torch.utils.data.DataLoader(BatchList(batches(0, 0, 1)), batch_size=None))
        found[loss.__name__] = len(module.gradients), str(refusal.value)
    return found


def test_batch_for_which_the_rule_fails_ends_the_run_before_its_update() -> None:
    [found] = run_distributed(updates_and_messages, 1)
    for name, (updates, message) in found.items():
        assert updates == 2, f"{name}: {updates} updates"
        assert "is not made up of the losses of its micro-batches" in message
        assert "Microbatches(weight=" in message
    built_anew = "built in another way than that of earlier batches"
    assert built_anew in found["contrastive_where_padded"][1]
    assert (
        "its Sum is divided by 11, 16 in micro-batches that are weighted by 0.5, 0.5"
        in (found["longer_than_a_threshold"][1])
    )


def refusal_of_one_rank() -> tuple[int, str]:
    module = Tokens(longer_than_a_threshold)
    trainer = make_trainer({"microbatches": 2, "zero_stage": 2}, 2, max_epochs=1, use_distributed_sampler=False)
    data = batches(0, 1) if trainer.global_rank == 0 else batches(0, 0)
    with pytest.raises(RuntimeError) as refusal:
        trainer.fit(module, torch.utils.data.DataLoader(BatchList(data), batch_size=None))
    return len(module.gradients), str(refusal.value)


def test_all_ranks_refuse_what_one_of_them_sees() -> None:
    for updates, message in run_distributed(refusal_of_one_rank, 2):
        assert updates == 1
        assert "is not made up of the losses of its micro-batches" in message


def with_a_norm(module: Tokens, logits: Tensor, tokens: Tensor) -> Tensor:
    return padding_ignored(module, logits, tokens) + 1e-3 * module.head.weight.norm()


def infinite_where_padded(module: Tokens, logits: Tensor, tokens: Tensor) -> Tensor:
    """NaN in a second way of building the loss: that is for others to report."""
    loss = flat(logits, tokens)
    return loss * torch.tensor(float("nan")) + logits.mean() if bool((tokens < 2).any()) else loss


def plan_of(loss: Loss) -> str:
    module = train(loss, batches(0, 2), microbatches=2)
    return str(module.trainer.strategy.plan)


def test_the_plan_names_the_rule_and_its_evidence() -> None:
    [plan] = run_distributed(plan_of, 1, padding_ignored)
    assert "micro-batches are weighted by the entries of '' other than 1: " in plan  # the batch is that tensor
    assert "comparisons with an uncut batch, and what the loss is divided by in each batch (NllLoss)" in plan
    [plan] = run_distributed(plan_of, 1, with_a_norm)
    assert "not watched, since it does not show what it divides by: LinalgVectorNorm" in plan


def updates_of_infinite_losses() -> int:
    return len(train(infinite_where_padded, batches(0, 4, 0), microbatches=2).gradients)


def test_losses_that_are_not_finite_say_nothing_about_rules() -> None:
    assert run_distributed(updates_of_infinite_losses, 1) == [3]


# -- what is read from a loss ----------------------------------------------------------------------------------------

LOGITS = torch.randn(4, 5, requires_grad=True)
LABELS = torch.tensor([1, 2, 3, 1])
KEPT = LABELS != 1


@pytest.mark.parametrize(
    ("loss", "divisors"),
    [
        (lambda: F.cross_entropy(LOGITS, LABELS), [4]),
        (lambda: F.cross_entropy(LOGITS, LABELS, ignore_index=1), [2]),
        (lambda: F.cross_entropy(LOGITS, LABELS, ignore_index=1, reduction="sum"), [1]),
        (lambda: F.cross_entropy(LOGITS, LABELS, reduction="none")[KEPT].mean(), [2]),
        (lambda: (LOGITS * KEPT[:, None]).sum() / KEPT.sum(), [2]),
        (lambda: (LOGITS * KEPT[:, None]).sum() / int(KEPT.sum()), [2]),
        (lambda: 0.5 * LOGITS.mean() + F.mse_loss(LOGITS, LOGITS.detach()) / 3, [40, 60]),
        (lambda: torch.stack([LOGITS[0].mean(), LOGITS[1].sum()]).mean(), [10, 2]),
        (lambda: F.binary_cross_entropy_with_logits(LOGITS, torch.rand(4, 5)).float(), [20]),
        (lambda: LOGITS.norm(), [None]),
        (lambda: LOGITS.mean((0, 1)).reshape(1).squeeze(), [20]),
    ],
    ids=lambda value: str(value) if isinstance(value, list) else "",
)
def test_divisors_are_read_from_the_graph(loss: Callable[[], Tensor], divisors: list[float | None]) -> None:
    evidence = evidence_of(loss())
    assert evidence is not None
    assert [reduction.divisor for reduction in evidence.reductions] == divisors


def test_a_loss_without_a_graph_tells_nothing() -> None:
    assert evidence_of(torch.tensor(1.0)) is None


def pieces(*divisors: float) -> list[LossEvidence]:
    return [LossEvidence(("mean",), (Reduction("MeanBackward0", divisor),)) for divisor in divisors]


def test_divisors_follow_the_weights_or_stay_the_same() -> None:
    watch = RuleWatch()
    watch.accept(pieces(4, 4))
    assert watch.doubt(pieces(4, 4), [0.5, 0.5]) is None
    assert watch.doubt(pieces(4, 8), [1 / 3, 2 / 3]) is None  # the terms of a mean
    doubt = watch.doubt(pieces(6, 6), [1 / 3, 2 / 3])
    assert doubt is not None
    assert doubt.reason == "its Mean is divided by 6, 6 in micro-batches that are weighted by 0.3333, 0.6667"
    watch.dismiss(doubt.reduction)
    assert watch.doubt(pieces(6, 6), [1 / 3, 2 / 3]) is None


def test_a_loss_built_otherwise_is_in_doubt_until_it_was_compared() -> None:
    watch = RuleWatch()
    assert watch.doubt(pieces(4, 4), [0.5, 0.5]) is not None
    watch.accept(pieces(4, 4))
    assert watch.doubt(pieces(4, 4), [0.5, 0.5]) is None
