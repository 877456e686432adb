"""With parts of the sequence between split layers, the numbers are those of the stock single-process Trainer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils.data import DataLoader

from lightning_effi import TensorParallel
from lightning_effi.compat import dtensor as dtensor_compat
from lightning_effi.tensor_parallel.layers.apply import AppliedPlan
from lightning_effi.tensor_parallel.planning.decide import decide
from lightning_effi.tensor_parallel.planning.plan import SequencePlan
from lightning_effi.tensor_parallel.planning.trace import trace_block
from tests.harness import (
    ADAMW_FP64,
    SGD_FP32,
    BatchList,
    Bounds,
    Training,
    WorkerError,
    make_trainer,
    run_distributed,
    run_isolated,
    train_and_assert_parity,
)
from tests.models import MODELS, ModelCase
from tests.models.gpt import GPT, Block, batches
from tests.models.hugging_face import llama_model
from tests.tensor_parallel.architectures import ARCHITECTURES
from tests.tensor_parallel.test_parity import SHORT_STEPS
from tests.tensor_parallel.test_run import Masks, Parameters

EVERYTHING: dict[str, ModelCase] = {**MODELS, **ARCHITECTURES}


def sequence_parallel(size: int, zero_stage: int = 2) -> dict[str, Any]:
    return {
        "tensor_parallel_size": size,
        "tensor": TensorParallel(sequence_parallel=True),
        "zero_stage": zero_stage,
    }


def train_and_compare(
    model: str, size: int = 2, world_size: int = 2, bounds: Bounds = SGD_FP32, zero_stage: int = 2, **settings: Any
) -> None:
    case = EVERYTHING[model]
    if case.missing:
        pytest.skip(f"needs {', '.join(case.missing)}")
    strategy = sequence_parallel(size, zero_stage)
    if settings.get("optimizer", "sgd") == "sgd":
        settings.setdefault("learning_rate", SHORT_STEPS)
    train_and_assert_parity(
        Training(case.module, case.batches, strategy=strategy, world_size=world_size, **settings), bounds
    )


STANDARD = ("gpt-tied", "llama-style", "llama", "gpt2", "norm-first")


def only(always: Sequence[str], cases: Iterable[str]) -> list[Any]:
    """``cases``, of which those that are not in ``always`` wait for ``-m full``."""
    return [case if case in always else pytest.param(case, marks=pytest.mark.full) for case in cases]


@pytest.mark.parametrize("model", only(("gpt-tied", "llama", "nn-decoder"), EVERYTHING))
def test_two_ranks_equal_single_process(model: str) -> None:
    train_and_compare(model)


# the lengths of texts, 10, are not divisible by 4
@pytest.mark.parametrize("model", only(("norm-first",), (*STANDARD, "gpt-tied", "encoder", "llama-kv1-sdpa", "t5")))
def test_four_ranks_equal_single_process(model: str) -> None:
    train_and_compare(model, size=4, world_size=4)


@pytest.mark.parametrize(
    ("model", "zero_stage"),
    [
        ("llama", 3),
        *(pytest.param(*case, marks=pytest.mark.full) for case in (("gpt-tied", 0), ("llama", 1), ("nn-decoder", 2))),
    ],
)
def test_two_by_two_ranks_equal_single_process(model: str, zero_stage: int) -> None:
    train_and_compare(
        model, world_size=4, zero_stage=zero_stage, clip=0.1, accumulate=2, optimizer="adamw", precision="64-true",
        bounds=ADAMW_FP64,
    )  # fmt: skip


def checkpointing_llama(**settings: Any) -> pl.LightningModule:
    module = MODELS["llama"].module(**settings)
    module.model.gradient_checkpointing_enable({"use_reentrant": False})
    return module


@pytest.mark.parametrize(
    ("world_size", "zero_stage"), [(2, 2), pytest.param(4, 3, marks=pytest.mark.full)], ids=["tp2", "zero3-tp2"]
)
def test_recomputed_blocks_equal_single_process(world_size: int, zero_stage: int) -> None:
    if missing := MODELS["llama"].missing:
        pytest.skip(f"needs {missing}")
    strategy = sequence_parallel(2, zero_stage)
    train_and_assert_parity(
        Training(
            checkpointing_llama,
            MODELS["llama"].batches,
            strategy=strategy,
            world_size=world_size,
            learning_rate=SHORT_STEPS,
        )
    )


# -- messages and memory ---------------------------------------------------------------------------------------------


def blocks_of(kind: str) -> tuple[nn.ModuleList, dict[str, Any]]:
    torch.manual_seed(0)
    if kind == "gpt":
        return nn.ModuleList(Block(32, 4) for _ in range(3)), {}
    model = llama_model().model
    table = model.rotary_emb(torch.zeros(2, 8, 32), torch.arange(8)[None])
    return model.layers[:3], {"position_embeddings": table, "attention_mask": None}


def run_blocks(kind: str, parallel: bool) -> tuple[Counter[str], Counter[str], int]:
    """Messages of the middle one of three blocks, forward and backward, and the bytes that all keep for backward."""
    blocks, kwargs = blocks_of(kind)
    x = torch.randn(2, 8, 32, requires_grad=True)
    groups, _ = decide(blocks[0], trace_block(blocks[0], (x,), kwargs), 2)
    found = [layer for group in groups for layer in group.layers]
    layers = [layer.below(str(i)) for i in range(3) for layer in found]
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    AppliedPlan(blocks, layers, mesh, [SequencePlan(str(i), 1, gathers=i == 2) for i in range(3)] if parallel else ())
    held: dict[int, int] = {}
    parameters = {local.untyped_storage().data_ptr() for local in map(dtensor_compat.local_tensor, blocks.parameters())}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            held[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        first = blocks[0](x, **kwargs)
        with CommDebugMode() as forward:
            second = blocks[1](first, **kwargs)
        last = blocks[2](second, **kwargs)
    pulled = torch.autograd.grad(last.sum(), second, retain_graph=True)
    with CommDebugMode() as backward:
        torch.autograd.backward(second, pulled, inputs=[first, *blocks[1].parameters()])
    return *(Counter({str(op): n for op, n in mode.get_comm_counts().items()}) for mode in (forward, backward)), sum(
        held.values()
    )


def test_a_block_assembles_twice_and_sums_into_parts_twice() -> None:
    for forward, backward, _ in run_distributed(run_blocks, 2, "llama", True):
        assert forward == {"c10d._allgather_base_": 2, "c10d._reduce_scatter_base_": 2}
        # the gradients of two norms are summed over the ranks' positions
        assert backward == {"c10d._allgather_base_": 2, "c10d._reduce_scatter_base_": 2, "c10d.allreduce_": 2}


def test_less_is_kept_for_backward() -> None:
    for kind in ("gpt", "llama"):
        for (*_, parts), (*_, whole) in zip(
            run_distributed(run_blocks, 2, kind, True), run_distributed(run_blocks, 2, kind, False), strict=True
        ):
            stream = 2 * 8 * 32 * 4  # bytes of the hidden states; both norms of three blocks keep them
            assert whole - parts >= 6 * stream // 2, kind


# -- what blocks cannot do, and what happens between them ------------------------------------------------------------


class Mixing(GPT):
    """A convolution over neighbouring positions in the residual stream."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for block in self.blocks:
            block.mix = nn.Conv1d(16, 16, 3, padding=1)
            block.forward = partial(mix_and_attend, block)


def mix_and_attend(self: nn.Module, x: Tensor) -> Tensor:
    x = x + self.mix(x.transpose(1, 2)).transpose(1, 2)
    x = x + self.attention(self.norm1(x))
    return x + self.mlp(self.norm2(x))


class OneRow(GPT):
    """Blocks that are given ``[positions, width]``."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens[0]) + self.positions[: tokens.shape[1]]
        for block in self.blocks:
            block.attention = nn.Identity()
            x = block(x)
        return self.head(self.norm(x))[None].expand(len(tokens), -1, -1)


REFUSED = {
    "mixing": (Mixing, "'blocks.\\*' cannot work on parts of the sequence: conv1d would have to see all positions."
                       " Use sequence_parallel=False"),
    "one row": (OneRow, "'blocks.\\*' cannot work .*: none of its arguments is a floating-point tensor \\[rows,"),
}  # fmt: skip


def fit(kind: str) -> None:
    pl.seed_everything(5, verbose=False)
    data = DataLoader(BatchList(batches(1)), batch_size=None)
    make_trainer(sequence_parallel(2), 2, max_steps=1).fit(REFUSED[kind][0](), data)


@pytest.mark.parametrize("kind", REFUSED)
def test_blocks_that_need_all_positions_are_refused_by_name(kind: str) -> None:
    with pytest.raises(WorkerError, match=REFUSED[kind][1]):
        run_distributed(fit, 2, kind)


class Between(GPT):
    """Looks at hidden states between blocks, in every way that comes to mind."""

    def loss(self, batch: Tensor) -> Tensor:
        x = self.embedding(batch[:, :-1]) + self.positions
        kept = []
        for block in self.blocks:
            x = block(x)
            kept.append(x)
        penalty = torch.stack(kept[1:]).square().mean() + kept[0][:, 2:5].abs().mean() + kept[1].mean(dim=1).norm()
        [slope] = torch.autograd.grad(kept[1].square().sum(), kept[0], create_graph=False, retain_graph=True)
        assert slope.shape == x.shape
        penalty = penalty + (slope * kept[0]).mean()
        kept[2].register_hook(lambda gradient: gradient / gradient.norm())
        logits = self.head(self.norm(kept[-1] + kept[0].detach()))
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()) + penalty

    def predict_step(self, batch: Tensor, batch_idx: int) -> dict[str, Tensor]:
        return {"hidden": self.blocks[0](self.embedding(batch))}


def test_hidden_states_between_blocks_are_those_of_the_whole() -> None:
    train_and_assert_parity(Training(Between, batches, strategy=sequence_parallel(2), world_size=2))


def predict(strategy: dict[str, Any] | None, world_size: int) -> Tensor:
    pl.seed_everything(5, verbose=False)
    data = DataLoader(BatchList([batch[:, :5] for batch in batches(2)]), batch_size=None)
    return torch.cat([part["hidden"] for part in make_trainer(strategy, world_size).predict(Between(), data)])


def test_hidden_states_are_returned_whole() -> None:
    expected = run_isolated(predict, None, 1)
    for hidden in run_distributed(predict, 2, sequence_parallel(2), 2):
        assert type(hidden) is Tensor
        torch.testing.assert_close(hidden, expected)


def plan_with_a_hook() -> list[tuple[str, bool]]:
    module = GPT()
    module.blocks[1].register_forward_hook(lambda *_: None)
    data = DataLoader(BatchList(batches(1)), batch_size=None)
    trainer = make_trainer(sequence_parallel(2), 2, max_steps=1)
    trainer.fit(module, data)
    assert "blocks.*: norms, dropouts and residual stream in parts of dim 1 x 4" in str(trainer.strategy.plan)
    return [(plan.name, plan.gathers) for plan in trainer.strategy.plan.tensor.sequence]


def test_what_a_forward_hook_sees_is_whole() -> None:
    expected = [("blocks.0", False), ("blocks.1", True), ("blocks.2", False), ("blocks.3", True)]
    assert run_distributed(plan_with_a_hook, 2) == [expected] * 2


class ResidualDropout(GPT):
    def __init__(self) -> None:
        super().__init__(optimizer="sgd")
        for block in self.blocks:
            block.mlp.append(nn.Dropout(0.5))


def train_with_dropout() -> Any:
    pl.seed_everything(5, verbose=False)
    module, masks, parameters = ResidualDropout(), Masks(), Parameters()
    trainer = make_trainer(sequence_parallel(2), 2, callbacks=[masks, parameters], max_steps=5)
    trainer.fit(module, DataLoader(BatchList(batches(5)), batch_size=None))
    return masks.kept, parameters.last


def test_positions_are_dropped_independently_and_replicas_stay_equal_to_the_bit() -> None:
    (first, replicas), (second, others) = run_distributed(train_with_dropout, 2)
    for name, kept in first.items():
        assert len(kept) == len(second[name]) == 2 * 12 * 16 // 2  # half of the positions
        assert not torch.equal(kept, second[name])
    rate = torch.cat([*first.values(), *second.values()]).float().mean()
    assert abs(float(rate) - 0.5) < 0.05
    assert "blocks.0.norm1.weight" in replicas
    assert all(torch.equal(others[name], value) for name, value in replicas.items())
