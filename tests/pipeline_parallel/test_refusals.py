"""What a pipeline cannot carry out ends with a message on all ranks, before anything is trained."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.harness import Training, WorkerError, run, train_and_assert_parity
from tests.models.gpt import GPT, Block, batches


def pipelined(module: Callable[..., Any], data: Any = None, **strategy: Any) -> Training:
    return Training(
        module,
        data or partial(batches, rows=6),
        strategy={"pipeline_parallel_size": 2, **strategy},
        world_size=2,
        timeout=30.0,
    )


class Skip(GPT):
    def forward(self, tokens: Tensor) -> Tensor:
        start = x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x) + start)


class Contrastive(GPT):
    def loss(self, batch: Tensor) -> Tensor:
        x = self.embedding(batch)[:, :12]
        for block in self.blocks:
            x = block(x)
        vectors = F.normalize(x.mean(1), dim=-1)
        return F.cross_entropy(vectors @ vectors.T, torch.arange(len(batch)))


class Manual(GPT):
    automatic_optimization = False


class Swallows(GPT):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        try:
            return super().training_step(batch, batch_idx)
        except BaseException:
            return torch.zeros((), requires_grad=True)


class NoTrunk(GPT):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.blocks = nn.ModuleList()


class SharesNorms(GPT):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for block in self.blocks:
            block.norm1 = self.blocks[0].norm1


class KeepsPenalties(GPT):
    """Each block leaves a penalty in an attribute, where another stage would find that of an old batch."""

    class Block(Block):
        def forward(self, x: Tensor) -> Tensor:
            x = super().forward(x)
            self.penalty = x.square().mean()
            return x

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.blocks = nn.ModuleList(KeepsPenalties.Block(16, 4) for _ in range(4))

    def loss(self, batch: Tensor) -> Tensor:
        return super().loss(batch) + sum(block.penalty for block in self.blocks)


class CollectsByHooks(GPT):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.collected: list[Tensor] = []
        for block in self.blocks:
            block.mlp.register_forward_hook(lambda module, args, output: self.collected.append(output.square().mean()))

    def loss(self, batch: Tensor) -> Tensor:
        self.collected.clear()
        return super().loss(batch) + sum(self.collected)


class DropsLayers(GPT):
    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks[0](self.embedding(tokens))))


class TakesGradients(GPT):
    def loss(self, batch: Tensor) -> Tensor:
        loss = super().loss(batch)
        return loss + torch.autograd.grad(loss, self.head.weight, create_graph=True)[0].square().sum()


class Checkpointed(GPT):
    def __init__(self, reentrant: bool = False, **settings: Any) -> None:
        super().__init__(**settings)
        self.reentrant = reentrant

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.positions[: tokens.shape[1]]
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(self.norm(x))


class Counts(GPT):
    steps_seen = 0

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.steps_seen += 1
        return super().training_step(batch, batch_idx)


class OtherBatchOnEachRank(GPT):
    def on_after_batch_transfer(self, batch: Tensor, dataloader_idx: int) -> Tensor:
        return (batch + self.global_rank) % 17


class CallsTheModelOutside(GPT):
    def on_train_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None:
        self(batch[:, :-1])


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (Skip, r"a value computed before 'blocks\.2' is used after it"),
        (Contrastive, "not made up of the losses of its micro-batches"),
        (Manual, "does not work with manual optimization"),
        (Swallows, "catches BaseException around the model"),
        (NoTrunk, "no list of repeated blocks was found"),
        (SharesNorms, r"none without shared parameters \('blocks\.0\.norm1' \(LayerNorm\) is also 'blocks\.1\.norm1'"),
        (KeepsPenalties, r"attribute 'penalty' of 'blocks\.0' computed before 'blocks\.2' is used after it"),
        (CollectsByHooks, r"computed inside 'blocks\.0', which a hook or a list kept, is used outside of it"),
        (DropsLayers, r"calls 1 of the module's 4 \(layer drop must be switched off\)"),
        (TakesGradients, "a step that takes gradients itself"),
        (partial(Checkpointed, True), "Pass use_reentrant=False"),
        (Counts, "changes 'steps_seen'"),
        (OtherBatchOnEachRank, "were given different batches"),
        (CallsTheModelOutside, r"'blocks\.2' was called outside of the step hooks|'embedding' was called outside"),
        (partial(GPT, blocks=1), "no list of repeated blocks|need at least 2 blocks"),
    ],
)
def test_refused_by_name(module: Callable[..., Any], message: str) -> None:
    with pytest.raises(WorkerError, match=message):
        run(pipelined(module))


def test_activation_checkpointing_by_the_module_itself() -> None:
    train_and_assert_parity(pipelined(Checkpointed))


class FailsOnTheLastStage(GPT):
    def loss(self, batch: Tensor) -> Tensor:
        loss = super().loss(batch)
        if self.trainer.global_step == 1:
            raise KeyError("no such class")
        return loss


def test_error_on_one_stage_ends_all_with_the_original_one() -> None:
    start = time.monotonic()
    with pytest.raises(WorkerError, match="no such class") as caught:
        run(pipelined(FailsOnTheLastStage))
    assert caught.value.rank == 1
    assert time.monotonic() - start < 15


def test_batches_of_changing_lengths() -> None:
    train_and_assert_parity(pipelined(GPT, changing_lengths))


def changing_lengths(count: int) -> list[Tensor]:
    lengths = (7, 5, 10, 4)
    return [batch[: 3 + index % 3, : lengths[index % 4]] for index, batch in enumerate(batches(count, rows=6))]


class BackwardOfItsOwn(GPT):
    def backward(self, loss: Tensor) -> None:
        (2 * loss).backward()


def fifths(batch: Tensor, count: int) -> list[Tensor]:
    return list(batch.chunk(5))


@pytest.mark.parametrize(
    ("module", "rows", "settings", "message"),
    [
        (BackwardOfItsOwn, 6, {"pipeline": "zbv"}, "BackwardOfItsOwn has a backward\\(\\) of its own. Use .*'1f1b'"),
        (
            GPT,
            5,
            {"pipeline": "interleaved", "microbatches": {"count": 4, "splitter": f"{__name__}.fifths"}},
            "returned 5 micro-batches, which the pipeline's schedule cannot have; 4 would do",
        ),
    ],
    ids=["backward", "splitter"],
)
def test_what_a_schedule_cannot_carry_out(module: type[GPT], rows: int, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(WorkerError, match=message):
        run(pipelined(module, partial(batches, rows=rows), **settings))


def test_backward_of_its_own_is_called_on_the_last_stage() -> None:
    train_and_assert_parity(pipelined(BackwardOfItsOwn, pipeline="interleaved"))
