"""Steps, blocks and batches as people write them: right through a pipeline, or refused by name."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.harness import Training, WorkerError, run, train_and_assert_parity
from tests.models.base import ExampleModule
from tests.models.gpt import CONTEXT, GPT, VOCABULARY, Block, batches


def pipelined(module: Callable[..., Any], data: Any = None, stages: int = 2, **settings: Any) -> Training:
    strategy = {"pipeline_parallel_size": stages, "microbatches": 4, **settings.pop("strategy", {})}
    return Training(module, data or partial(batches, rows=6), strategy=strategy, world_size=stages, **settings)


# --- losses, windows and clipping -------------------------------------------------------------------------------------


class SumLoss(GPT):
    """Not normalised at all; SGD shows its scale."""

    def loss(self, batch: Tensor) -> Tensor:
        return F.cross_entropy(self(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten(), reduction="sum") / 50


class PenalizedWeights(GPT):
    """A penalty on all parameters, those of other stages included."""

    def loss(self, batch: Tensor) -> Tensor:
        return super().loss(batch) + 1e-3 * sum(p.square().sum() for p in self.parameters())


def test_penalty_on_all_parameters() -> None:
    train_and_assert_parity(pipelined(PenalizedWeights, learning_rate=0.1))


@pytest.mark.parametrize(
    ("module", "accumulate"),
    [(SumLoss, 3), *(pytest.param(*case, marks=pytest.mark.full) for case in [(SumLoss, 1), (GPT, 3), (GPT, 1)])],
)
def test_mean_and_sum_losses_over_windows(module: type[GPT], accumulate: int) -> None:
    train_and_assert_parity(pipelined(module, accumulate=accumulate, learning_rate=0.1))


class ClipsByTheLargestGradient(GPT):
    """Calls torch's own function on the parameters that the rank can see."""

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        total = torch.nn.utils.clip_grad_norm_(self.parameters(), 0.01, norm_type=float("inf"))
        self.log("norm_epoch", total, on_step=False, on_epoch=True, batch_size=1)


class ClipsByThreeNorm(GPT):
    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        total = torch.nn.utils.clip_grad_norm_(parameters, 0.05, norm_type=3.0, foreach=False)
        self.log("norm_epoch", total, on_step=False, on_epoch=True, batch_size=1)


@pytest.mark.parametrize(
    ("module", "stages"),
    [
        (ClipsByTheLargestGradient, 2),
        pytest.param(ClipsByTheLargestGradient, 4, marks=pytest.mark.full),
        (ClipsByThreeNorm, 2),
        pytest.param(ClipsByThreeNorm, 4, marks=pytest.mark.full),
    ],
)
def test_norms_that_the_module_takes_itself_are_over_all_stages(module: type[GPT], stages: int) -> None:
    train_and_assert_parity(pipelined(module, stages=stages))


# --- sizes that change ------------------------------------------------------------------------------------------------


def shrinking(count: int) -> list[Tensor]:
    """6, 3 and 1 rows; lengths 6, 4 and 9."""
    sizes = ((6, 7), (3, 5), (1, 10))
    return [batch[: sizes[i % 3][0], : sizes[i % 3][1]] for i, batch in enumerate(batches(count, rows=6))]


@pytest.mark.parametrize("stages", [2, pytest.param(4, marks=pytest.mark.full)])
def test_rows_and_lengths_that_change_from_batch_to_batch(stages: int) -> None:
    train_and_assert_parity(pipelined(GPT, shrinking, stages, steps=6))


# --- what blocks are given and return ---------------------------------------------------------------------------------


class RichBlock(Block):
    """Called with a mask and optional arguments; returns a tuple."""

    def forward(  # type: ignore[override]
        self, x: Tensor, mask: Tensor, pos: Tensor | None = None, cache: Any = None
    ) -> tuple[Tensor, Tensor]:
        assert cache is None
        y = super().forward(x if pos is None else x + pos) * mask.unsqueeze(-1)
        return y, y.square().mean(dim=-1)


class RichGPT(GPT):
    """A mask made in ``forward`` for every block, a position table for the first, an extra output of the last."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.blocks = nn.ModuleList(RichBlock(16, 4) for _ in range(4))

    def forward(self, tokens: Tensor) -> Tensor:
        mask = (tokens != 0).float()
        x = self.embedding(tokens)
        extra = None
        for index, block in enumerate(self.blocks):
            x, extra = block(x, mask, pos=self.positions[: tokens.shape[1]] if index == 0 else None, cache=None)
        return self.head(self.norm(x)) + extra.unsqueeze(-1)


class SkipThroughBlocks(GPT):
    """The embedding is an argument of every block, and the last one adds it."""

    class Block(Block):
        def forward(self, x: Tensor, start: Tensor, last: bool) -> Tensor:  # type: ignore[override]
            x = super().forward(x)
            return x + start if last else x

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.blocks = nn.ModuleList(SkipThroughBlocks.Block(16, 4) for _ in range(4))

    def forward(self, tokens: Tensor) -> Tensor:
        start = x = self.embedding(tokens)
        for index, block in enumerate(self.blocks):
            x = block(x, start, last=index == 3)
        return self.head(self.norm(x))


class ComplexTable(GPT):
    """Rotations as complex numbers, made once and given to every block."""

    class Block(Block):
        def forward(self, x: Tensor, table: Tensor) -> Tensor:  # type: ignore[override]
            pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2).contiguous())
            return super().forward(torch.view_as_real(pairs * table).flatten(-2))

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.blocks = nn.ModuleList(ComplexTable.Block(16, 4) for _ in range(4))

    def forward(self, tokens: Tensor) -> Tensor:
        angles = torch.outer(torch.arange(tokens.shape[1]), torch.arange(8)).float()
        table = torch.polar(torch.ones_like(angles), angles)
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, table)
        return self.head(self.norm(x))


class AuxiliaryOutput(GPT):
    """Each block returns a penalty beside its output, and the loss adds them: they bypass the boundary."""

    class Block(Block):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            x = super().forward(x)
            return x, x.square().mean()

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.blocks = nn.ModuleList(AuxiliaryOutput.Block(16, 4) for _ in range(4))

    def loss(self, batch: Tensor) -> Tensor:
        x, penalties = self.embedding(batch[:, :-1]), []
        for block in self.blocks:
            x, penalty = block(x)
            penalties.append(penalty)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), batch[:, 1:].flatten()) + sum(penalties)


class CarriedPenalty(AuxiliaryOutput):
    """The same sum, handed from block to block, which crosses a boundary as any argument does."""

    class Block(AuxiliaryOutput.Block):
        def forward(self, x: Tensor, penalty: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            x, own = super().forward(x)
            return x, penalty + own

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.blocks = nn.ModuleList(CarriedPenalty.Block(16, 4) for _ in range(4))

    def loss(self, batch: Tensor) -> Tensor:
        x, penalty = self.embedding(batch[:, :-1]), torch.zeros(())
        for block in self.blocks:
            x, penalty = block(x, penalty)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), batch[:, 1:].flatten()) + penalty


@dataclass
class State:
    x: Tensor
    mask: Tensor
    depth: int = 0


class DataclassState(GPT):
    """Blocks are given and return a dataclass."""

    class Block(Block):
        def forward(self, state: State) -> State:  # type: ignore[override]
            return State(super().forward(state.x) * state.mask, state.mask, state.depth + 1)

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.blocks = nn.ModuleList(DataclassState.Block(16, 4) for _ in range(4))

    def forward(self, tokens: Tensor) -> Tensor:
        state = State(self.embedding(tokens), (tokens != 0).float().unsqueeze(-1))
        for block in self.blocks:
            state = block(state)
        return self.head(self.norm(state.x)) / state.depth


class ParameterForEveryBlock(GPT):
    """A parameter itself is an argument of every block, and part of the gradient comes from each stage."""

    class Block(Block):
        def forward(self, x: Tensor, positions: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x + positions)

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.blocks = nn.ModuleList(ParameterForEveryBlock.Block(16, 4) for _ in range(4))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.positions)
        return self.head(self.norm(x))


class Hooked(GPT):
    """Hooks on blocks and units change what goes in and comes out, forward and backward."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for module in (*self.blocks, self.embedding):
            module.register_forward_hook(lambda module, args, output: 0.9 * output)
        for block in self.blocks:
            block.register_forward_pre_hook(lambda module, args: (1.1 * args[0],))
            block.register_full_backward_hook(lambda module, inputs, outputs: (0.5 * inputs[0],))


class WorksInPlace(GPT):
    """Tokens are masked in place in what the embedding and a block returned."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x[tokens == 3] = self.positions[0]
        for block in self.blocks:
            x = block(x)
            x[:, 0] = 0.0
        return self.head(self.norm(x))


class FrozenWithoutGradients(GPT):
    """Frozen blocks run under ``no_grad``; only what follows them is trained."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(tied=False, **settings)
        self.blocks.requires_grad_(False)
        self.embedding.requires_grad_(False)
        self.positions.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.embedding(tokens)
            for block in self.blocks:
                x = block(x)
        return self.head(self.norm(x))


class LogsBetweenBlocks(GPT):
    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for index, block in enumerate(self.blocks):
            x = block(x)
            self.log(f"square_{index}_epoch", x.square().mean(), on_step=False, on_epoch=True, batch_size=1)
        return self.head(self.norm(x))


class SkipsABatch(GPT):
    """Returns before the model is called, for a batch like the others."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        return None if batch_idx == 1 else super().training_step(batch, batch_idx)


def test_steps_that_skip_a_batch_are_refused_as_lightning_does() -> None:
    with pytest.raises(WorkerError, match="returning None in distributed training is not supported"):
        run(pipelined(SkipsABatch))


@pytest.mark.parametrize(
    ("module", "schedule"),
    [
        (DataclassState, "1f1b"),
        pytest.param(ParameterForEveryBlock, "interleaved", marks=pytest.mark.full),
        (Hooked, "zb1p"),
        pytest.param(WorksInPlace, "1f1b", marks=pytest.mark.full),
        (FrozenWithoutGradients, "1f1b"),
        (LogsBetweenBlocks, "zbv"),
    ],
)
def test_what_steps_do_between_blocks(module: type[GPT], schedule: str) -> None:
    train_and_assert_parity(pipelined(module, strategy={"pipeline": schedule}, learning_rate=0.1))


@pytest.mark.parametrize("module", [RichGPT, SkipThroughBlocks, ComplexTable, CarriedPenalty])
def test_arguments_and_outputs_of_blocks(module: type[GPT]) -> None:
    train_and_assert_parity(pipelined(module, learning_rate=0.1))


# --- batches ----------------------------------------------------------------------------------------------------------


@dataclass
class Meta:
    names: list[str]
    k: int


class ReadsEverything(GPT):
    """A nested batch: rows must match, and what is not laid out by rows must stay whole."""

    def loss(self, batch: Any) -> Tensor:
        ids = batch["ids"]
        assert batch["opt"] is None
        assert batch["meta"].k == 3
        assert batch["pairs"][1] == batch["meta"].names
        assert [int(name) for name in batch["meta"].names] == ids[:, 0].tolist()
        assert batch["lengths"] == [int(row[1]) for row in ids]
        assert batch["mask"].shape == (CONTEXT, CONTEXT)
        x = self.embedding(ids[:, :-1])
        for block in self.blocks:
            x = block(x)
        x = torch.einsum("ts,rsc->rtc", batch["mask"], self.norm(x))
        losses = F.cross_entropy(self.head(x).flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        return batch["w"] * losses.mean()


def nested(count: int) -> list[Any]:
    return [
        {
            "ids": ids,
            "meta": Meta([str(int(row[0])) for row in ids], 3),
            "pairs": (ids[:, :1], [str(int(row[0])) for row in ids]),
            "opt": None,
            "lengths": [int(row[1]) for row in ids],
            "w": torch.tensor(0.5),
            "mask": torch.ones(CONTEXT, CONTEXT).tril() / CONTEXT,
        }
        for ids in batches(count, rows=6)
    ]


def test_nested_batches_with_names_none_and_numbers() -> None:
    train_and_assert_parity(pipelined(ReadsEverything, nested))


def test_batch_encodings_of_a_tokenizer() -> None:
    pytest.importorskip("transformers")
    from tests.models.hugging_face import bert

    train_and_assert_parity(pipelined(bert, encodings))


def encodings(count: int) -> list[Any]:
    from transformers import BatchEncoding

    from tests.models.hugging_face import masked_batches

    return [BatchEncoding(batch) for batch in masked_batches(count, rows=5)]


# --- whole modules ----------------------------------------------------------------------------------------------------


class FrozenButTheEnd(ExampleModule):
    """Everything is frozen but the last block and the pooler; ``outputs[0]`` of a call by keywords; kept objects."""

    def __init__(self, reader: Any = None, **settings: Any) -> None:
        from transformers import BertConfig, BertModel

        super().__init__(**settings)
        self.save_hyperparameters()
        self.bert = BertModel(
            BertConfig(
                vocab_size=23, hidden_size=32, num_hidden_layers=4, num_attention_heads=4, intermediate_size=64,
                initializer_range=0.1, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
            )
        )  # fmt: skip
        self.classifier = nn.Linear(32, 2)
        self.bert.requires_grad_(False)
        self.bert.encoder.layer[-1].requires_grad_(True)
        self.bert.pooler.requires_grad_(True)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        outputs = self.bert(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
        first = outputs[0][:, 0]
        return F.cross_entropy(self.classifier(outputs[1] + first), batch["input_ids"][:, 1] % 2)


class Reader:
    """A data set's reader, as people keep it among the hyperparameters."""

    def __init__(self, words: Sequence[str]) -> None:
        self.words = words


def test_frozen_model_of_which_the_end_is_trained() -> None:
    pytest.importorskip("transformers")
    from tests.models.hugging_face import masked_batches

    module = partial(FrozenButTheEnd, reader=Reader(["a", "b"]))
    train_and_assert_parity(pipelined(module, partial(masked_batches, rows=5), learning_rate=0.1))


class PermutedDecoder(ExampleModule):
    """The module is the network; ``training_step`` decodes under several permutations of its own making."""

    def __init__(self, permutations: int = 1, **settings: Any) -> None:
        super().__init__(**settings)
        self.permutations = permutations
        self.rng = np.random.default_rng(3)
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.queries = nn.Parameter(0.1 * torch.randn(1, CONTEXT, 16))
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True), 2, enable_nested_tensor=False
        )
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(16, 4, 32, dropout=0.0, batch_first=True), 2)
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        raise AssertionError("only used in validation")

    def training_step(self, batch: tuple[Tensor, list[str]], batch_idx: int) -> Tensor:
        tokens, names = batch
        assert len(names) == len(tokens)
        memory = self.encoder(self.embedding(tokens[:, :-1]))
        total, count = torch.zeros(()), 0
        for _ in range(self.permutations):
            order = torch.from_numpy(self.rng.permutation(CONTEXT))
            queries = self.queries[:, order].expand(len(tokens), -1, -1)
            scores = self.head(self.decoder(queries, memory))
            targets = tokens[:, 1:][:, order]
            total = total + targets.numel() * F.cross_entropy(scores.flatten(0, 1), targets.flatten())
            count += targets.numel()
        loss = total / count
        self.log("train_loss", loss, on_step=True, on_epoch=True, batch_size=1)
        return loss


def images_with_names(count: int) -> list[Any]:
    return [(batch, [f"row {i}" for i in range(len(batch))]) for batch in batches(count, rows=4)]


def test_module_that_is_the_network_and_draws_permutations() -> None:
    train_and_assert_parity(pipelined(PermutedDecoder, images_with_names, learning_rate=0.1))


class MasksWithItsOwnGenerator(GPT):
    """The last stage draws more than the first; still both must mask the same tokens."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.rng = np.random.default_rng(5)

    def loss(self, batch: Tensor) -> Tensor:
        self.masked = masked = torch.from_numpy(self.rng.random(tuple(batch.shape))) < 0.3
        start = self.embedding(batch[:, :-1].masked_fill(masked[:, :-1], 0))
        x = start
        for block in self.blocks:
            x = block(x)
        self.rng.random(3)
        losses = F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), batch[:, 1:].flatten(), reduction="none")
        return (losses * masked[:, 1:].flatten()).mean()


class DrawnMasks(pl.Callback):
    observation: list[Tensor]

    def on_train_start(self, *_: Any) -> None:
        self.observation = []

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        self.observation.append(pl_module.masked.clone())


def test_generators_of_the_module_draw_alike_on_all_stages() -> None:
    weighted = {"microbatches": {"count": 3, "weight": "samples"}}
    training = pipelined(MasksWithItsOwnGenerator, strategy=weighted, callbacks=(DrawnMasks,))
    first, last = (held for [held] in run(training).observations)
    assert all(torch.equal(a, b) for a, b in zip(first, last, strict=True))
    assert not torch.equal(first[0], first[1])


class Packed(GPT):
    """A batch is a list of packed pieces of different lengths."""

    def loss(self, batch: Any) -> Tensor:
        if isinstance(batch, Tensor):
            return super().loss(batch)
        rows = sum(len(piece) for piece in batch)
        return sum(len(piece) / rows * super(Packed, self).loss(piece) for piece in batch)


def packs(count: int) -> list[list[Tensor]]:
    return [[batch[:2], batch[2:3, :6], batch[3:, :9]] for batch in batches(count, rows=6)]


def as_it_is(batch: list[Tensor], count: int) -> list[Tensor]:
    return batch


@pytest.mark.parametrize("stages", [1, 2])
def test_batches_that_are_lists_of_micro_batches(stages: int) -> None:
    given = {"splitter": f"{__name__}:as_it_is", "count": 3, "weight": "samples"}
    train_and_assert_parity(pipelined(Packed, packs, stages, strategy={"microbatches": given}))


def test_lists_of_micro_batches_need_a_rule() -> None:
    given = {"splitter": f"{__name__}:as_it_is", "count": 3}
    with pytest.raises(WorkerError, match="has no uncut form"):
        run(pipelined(Packed, packs, strategy={"microbatches": given}))


class TeacherAndStudent(GPT):
    """The teacher follows at the start of the step, in place, and both run on several views."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.student = GPT(tied=False)
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        del self.blocks, self.embedding, self.head, self.norm, self.positions
        self.register_buffer("center", torch.zeros(VOCABULARY))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        with torch.no_grad():
            for ours, theirs in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                ours.mul_(0.9).add_(theirs, alpha=0.1)
        targets = self.teacher(batch[:, :-1]).detach()
        self.center.mul_(0.9).add_(targets.mean((0, 1)), alpha=0.1)
        views = [batch[:, :-1], batch[:, 1:]]
        return sum(F.mse_loss(self.student(view), targets - self.center) for view in views)


class NormalizesOverTheBatch(GPT):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.normalize = nn.BatchNorm1d(16)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.normalize(self.embedding(tokens).transpose(1, 2)).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@pytest.mark.parametrize(
    ("module", "data", "message"),
    [
        (AuxiliaryOutput, None, r"a value computed before 'blocks\.2' is used after it"),
        (partial(PermutedDecoder, 3), images_with_names, r"'decoder\.layers\.0' is called twice in one step"),
        (TeacherAndStudent, None, r"'student\.blocks\.0' is called twice in one step"),
        (
            NormalizesOverTheBatch,
            None,
            r"changes 'normalize\.num_batches_tracked'.*Use pipeline_parallel_size=1 .*GroupNorm or LayerNorm",
        ),
    ],
)
def test_refused_by_name_on_all_ranks(module: Callable[..., Any], data: Any, message: str) -> None:
    with pytest.raises(WorkerError, match=message):
        run(pipelined(module, data, timeout=30.0))
