"""A vocabulary that is split in a run: planned by itself or by the user, and the numbers of the single process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torchmetrics
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_effi import TensorParallel
from lightning_effi.modules import find_blocks
from lightning_effi.tensor_parallel.planning.hints import read_hints
from lightning_effi.tensor_parallel.planning.vocabulary import plan_vocabulary
from lightning_effi.verify import run as diagnose_run
from tests.harness import Training, WorkerError, make_trainer, run_distributed, train_and_assert_parity
from tests.models.gpt import GPT, VOCABULARY, batches
from tests.models.hugging_face import llama_model
from tests.tensor_parallel.test_run import gpt, loader

TP2 = {"tensor_parallel_size": 2}


# -- what is split ---------------------------------------------------------------------------------------------------


class Tables(nn.Module):
    """Words, positions and two heads."""

    def __init__(self, tied: bool = True, **words: Any) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(20, 4, **words), nn.Embedding(10, 4)
        self.positions.weight.data = torch.zeros(1, 4)  # a table that is small beside the words
        self.pooler, self.head = nn.Linear(4, 4), nn.Linear(4, 20)
        if tied:
            self.head.weight = self.words.weight


def styles(module: nn.Module, size: int = 2, **asked: str) -> dict[str, str]:
    layers, _ = plan_vocabulary(module, find_blocks(module), asked, size)
    return {layer.name: str(layer) for layer in layers}


def test_large_tables_and_their_heads_are_split() -> None:
    assert styles(Tables()) == {"words": "vocab (20 rows)", "head": "vocab (tied to words)"}
    assert styles(Tables(tied=False)) == {
        "words": "vocab (20 rows)",
        "head": "vocab (as many outputs as words has rows)",
    }


@pytest.mark.parametrize("width", [16, 2])
def test_kinds_of_something_are_no_vocabulary(width: int) -> None:
    kinds, head = nn.Embedding(4, width), nn.Linear(width, 4)
    assert styles(nn.ModuleDict({"kinds": kinds, "head": head})) == {}
    assert styles(nn.ModuleDict({"kinds": kinds, "head": head}), head="vocab") == {"head": "vocab (asked for)"}


def test_user_overrides_what_is_derived() -> None:
    assert styles(Tables(), words="replicate") == {}
    assert styles(Tables(tied=False), head="replicate") == {"words": "vocab (20 rows)"}
    assert styles(Tables(tied=False), words="replicate", pooler="vocab") == {"pooler": "vocab (asked for)"}


@pytest.mark.parametrize(
    ("module", "size", "reason"),
    [
        (Tables(max_norm=1.0), 2, "words, head: max_norm=1.0 looks at the whole table"),
        (Tables(sparse=True), 2, "words, head: sparse=True looks at the whole table"),
        (Tables(), 16, "words, head: 20 rows are too few for 16 ranks"),
    ],
)
def test_what_cannot_be_split_stays_whole_with_a_reason(module: nn.Module, size: int, reason: str) -> None:
    assert plan_vocabulary(module, [], {}, size) == ([], [reason])


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"words": "vocab"}, "'words' cannot be split by vocabulary: max_norm=1.0 looks at .* Use 'replicate'"),
        (
            {"head": "row"},
            "'head' stands outside the repeated blocks, where a layer can be vocab or replicate, not row",
        ),
        ({"words": "vocab", "head": "replicate"}, "words and head share a weight and are given different styles"),
    ],
)
def test_bad_styles_are_refused(asked: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        styles(Tables(max_norm=1.0), **asked)


def count_parameters() -> Any:
    module = gpt("sgd")
    counted: dict[str, int] = {}

    def count(*_: Any) -> None:
        counted["held"] = sum(
            p.to_local().numel() if hasattr(p, "to_local") else p.numel() for p in module.parameters()
        )

    module.on_train_batch_end = count  # type: ignore[method-assign]
    trainer = make_trainer(TP2, 2, max_steps=1)
    trainer.fit(module, loader())
    return counted["held"], trainer.strategy.plan.tensor


def test_plan_says_what_is_split_and_counts_what_a_rank_holds() -> None:
    (most, plan), (other, _) = run_distributed(count_parameters, 2)
    assert "embedding: vocab (17 rows)" in str(plan)
    assert "head: vocab (tied to embedding)" in str(plan)
    assert most == plan.per_rank
    assert other == most - 16  # the odd row
    assert other <= plan.total / 2 + plan.whole


# -- numbers ---------------------------------------------------------------------------------------------------------


class Functional(GPT):
    """Uses its only table by functions, and looks at its logits in many ways."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(blocks=2, **settings)
        self.head = nn.Identity()
        self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=VOCABULARY)

    def training_step(self, batch: Tensor, batch_idx: int) -> dict[str, Tensor]:
        tokens, labels = batch[:, :-1], batch[:, 1:]
        x = F.embedding(tokens, self.embedding.weight) + self.positions[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.norm(x) @ self.embedding.weight.T
        loss = F.cross_entropy(logits.transpose(1, 2), labels, label_smoothing=0.1)
        loss = loss + 1e-3 * logits.logsumexp(-1).square().mean()
        loss = loss + 1e-3 * (self.embedding.weight.square().sum() + self.norm.weight.square().sum())
        self.log("accuracy", self.accuracy(logits.flatten(0, 1), labels.flatten()), on_epoch=True, sync_dist=True)
        self.log("train_loss", loss, on_epoch=True, sync_dist=True, batch_size=1)
        return {"loss": loss, "logits": logits}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert type(outputs["logits"]) is Tensor
        assert outputs["logits"].shape == (*batch[:, 1:].shape, VOCABULARY)


@pytest.mark.parametrize(
    ("world_size", "tensor", "zero_stage"),
    [(2, 2, 2), (4, 2, 3), *(pytest.param(*sizes, marks=pytest.mark.full) for sizes in [(4, 4, 2), (4, 2, 1)])],
)
def test_weights_and_logits_used_freely_equal_single_process(world_size: int, tensor: int, zero_stage: int) -> None:
    strategy = {"tensor_parallel_size": tensor, "zero_stage": zero_stage}
    train_and_assert_parity(Training(Functional, batches, strategy=strategy, world_size=world_size, clip=0.1))


PLANS: dict[str, dict[str, str]] = {
    "asked for": {"head": "vocab", "embed*": "vocab"},
    "table alone": {"head": "replicate"},
    "head alone": {"embedding": "replicate", "head": "vocab"},
    "neither": {"embedding": "replicate", "head": "replicate"},
}


@pytest.mark.parametrize(
    "plan", [p if p in ("table alone", "head alone") else pytest.param(p, marks=pytest.mark.full) for p in PLANS]
)
def test_user_plans_equal_single_process(plan: str) -> None:
    strategy = {**TP2, "tensor": TensorParallel(plan=PLANS[plan])}
    train_and_assert_parity(
        Training(untied_gpt, batches, strategy=strategy, world_size=2, clip=0.1, accumulate=2, steps=2)
    )


def untied_gpt(**settings: Any) -> GPT:
    return GPT(tied=False, blocks=2, **settings)


def refuse_block_layer() -> None:
    plan = TensorParallel(plan={"*.mlp.0": "vocab"})
    make_trainer({**TP2, "tensor": plan}, 2, max_steps=1).fit(gpt("sgd"), loader())


def test_vocab_inside_a_block_is_refused() -> None:
    with pytest.raises(WorkerError, match=r"'blocks.0.mlp.0' stands in a repeated block; 'vocab' is for"):
        run_distributed(refuse_block_layer, 2)


# -- a weight that a later step uses elsewhere -----------------------------------------------------------------------


class LaterElsewhere(GPT):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        return loss if batch_idx == 0 else loss + self.embedding(batch).mean() * self.embedding.weight.norm()


def train_later_elsewhere() -> None:
    make_trainer({**TP2, "verify": False}, 2, max_steps=2).fit(LaterElsewhere(), loader())


def test_a_weight_that_only_later_steps_use_elsewhere_is_explained() -> None:
    with pytest.raises(WorkerError, match="which the first training step did not do"):
        run_distributed(train_later_elsewhere, 2)


# -- what the model says itself --------------------------------------------------------------------------------------


def test_plans_of_transformers_are_read_and_what_is_unknown_is_named() -> None:
    pytest.importorskip("transformers")
    model = llama_model()
    hints = read_hints(nn.ModuleDict({"inner": model}))
    assert hints.styles["inner.model.layers.*.mlp.down_proj"] == "row"
    assert not hints.unknown
    model.config.base_model_tp_plan = {"layers.*.mlp.experts": "moe_tp_experts"}
    assert read_hints(model).unknown == (
        "model.layers.*.mlp.experts: base_model_tp_plan asks for 'moe_tp_experts', which has no counterpart here",
    )


class Hinted(GPT):
    """A block with a layer that stands alone, and a plan for it in the way of transformers."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(blocks=0, **settings)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16)) for _ in range(2))
        self.config = SimpleNamespace(
            base_model_tp_plan={"blocks.*.1": "colwise_gather_output", "blocks.*.0": "sequence_parallel"}
        )

    @property
    def base_model(self) -> nn.Module:
        return self


def train_hinted() -> str:
    trainer = make_trainer(TP2, 2, max_steps=1)
    trainer.fit(Hinted(), loader())
    return str(trainer.strategy.plan)


def test_layers_that_only_the_models_own_plan_splits_are_probed_and_split() -> None:
    plan = run_distributed(train_hinted, 2)[0]
    assert "blocks.*.*: column_gather (by base_model_tp_plan) x 2" in plan
    assert "blocks.*.0: base_model_tp_plan asks for 'sequence_parallel', which has no counterpart here" in plan


# -- cost ------------------------------------------------------------------------------------------------------------


def train_above_the_limit(verify: Any) -> bool:
    """Whether loss and gradients of the whole module were compared."""
    diagnose_run.LARGEST = 1000
    trainer = make_trainer({**TP2, "verify": verify}, 2, max_steps=1)
    judged: list[Any] = []
    judge = diagnose_run.judge

    def note(comparison: Any, *args: Any) -> None:
        judged.append(comparison)
        judge(comparison, *args)

    diagnose_run.judge = note
    trainer.fit(gpt("sgd"), loader())
    return bool(judged)


@pytest.mark.parametrize(("verify", "compared"), [("auto", False), (True, True)])
def test_large_modules_are_only_compared_as_a_whole_when_asked(verify: Any, compared: bool) -> None:
    assert run_distributed(train_above_the_limit, 2, verify, fresh=True) == [compared] * 2
