"""Plans are made from the module alone: groups, dtypes and bytes for any world, on meta parameters too."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_effi import Layout
from lightning_effi.data_parallel.plan import Compute, ShardingPlan, plan_sharding
from lightning_effi.plan import Plan, format_bytes
from tests.models.gpt import GPT

EXACT = Compute()
BF16_MIXED = Compute(torch.bfloat16, reduce_dtype=torch.float32)
MASTER = Compute(torch.bfloat16, everywhere=True)


def gpt_plan(zero_stage: int, compute: Compute = EXACT, shard: int = 2) -> ShardingPlan:
    with torch.device("meta"):
        module = GPT(width=8, heads=2, blocks=3)
    return plan_sharding(module, Layout(shard=shard), zero_stage, compute)


def test_each_block_is_a_group_and_the_rest_stays_with_the_root() -> None:
    plan = gpt_plan(2)
    assert [group.module for group in plan.groups] == ["blocks.0", "blocks.1", "blocks.2", ""]
    names = [parameter.name for group in plan.groups for parameter in group.parameters]
    assert len(names) == len(set(names))
    root = {parameter.name for parameter in plan.groups[-1].parameters}
    assert root == {"positions", "embedding.weight", "norm.weight", "norm.bias"}
    [embedding] = [p for p in plan.groups[-1].parameters if p.name == "embedding.weight"]
    assert embedding.also_named == ("head.weight",)


def test_only_matmul_weights_of_blocks_are_gathered_in_low_precision_under_autocast() -> None:
    plan = gpt_plan(2, BF16_MIXED)
    block, root = plan.groups[0], plan.groups[-1]
    low = {name.removeprefix("blocks.0.").rsplit(".", 1)[0] for name in block.low_precision}
    assert low == {"attention.qkv", "attention.proj", "mlp.0", "mlp.2"}
    assert not root.low_precision
    [norm] = [p for p in block.parameters if p.name == "blocks.0.norm1.weight"]
    assert plan.compute_dtype(block, norm) == torch.float32
    [qkv] = [p for p in block.parameters if p.name == "blocks.0.attention.qkv.weight"]
    assert plan.compute_dtype(block, qkv) == torch.bfloat16


def test_everything_but_the_kept_modules_is_low_precision_with_master_weights() -> None:
    kept = Compute(torch.bfloat16, everywhere=True, keep_fp32=("*norm*",))
    plan = gpt_plan(2, kept)
    high = {p.name for group in plan.groups for p in group.parameters if p.name not in group.low_precision}
    assert high == {f"blocks.{i}.norm{k}.{part}" for i in range(3) for k in (1, 2) for part in ("weight", "bias")} | {
        "norm.weight",
        "norm.bias",
    }


@pytest.mark.parametrize(
    ("compute", "zero_stage", "sharded"),
    [(EXACT, 0, False), (MASTER, 0, True), (EXACT, 1, True), (EXACT, 3, True)],
)
def test_parameters_are_sharded_from_stage_1_on_or_for_master_weights(
    compute: Compute, zero_stage: int, sharded: bool
) -> None:
    assert gpt_plan(zero_stage, compute).is_sharded is sharded


def test_one_process_shards_nothing() -> None:
    plan = gpt_plan(3, shard=1)
    assert plan.groups == ()
    assert "nothing is sharded" in str(plan)


class WithScalarAndFrozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.frozen = nn.Linear(8, 8, bias=False)
        self.frozen.requires_grad_(False)
        self.uneven = nn.Parameter(torch.ones(3, 4))
        self.empty = nn.Parameter(torch.ones(0, 4))


def test_bytes_count_padding_scalars_and_what_is_frozen() -> None:
    plan = plan_sharding(WithScalarAndFrozen(), Layout(shard=2), 2, EXACT)
    assert [info.name for info in plan.replicated] == ["scale", "empty"]
    # of 3 rows, a rank holds 2
    parameters = 8 * 8 * 4 // 2 + 2 * 4 * 4 + 4
    trainable = 2 * 4 * 4 + 4
    assert plan.bytes_per_rank(2) == {
        "parameters": parameters,
        "gradients": trainable,
        "optimizer states": 2 * trainable,
        "gathered parameters": (8 * 8 + 3 * 4) * 4,
    }
    assert "optimizer states" not in plan.bytes_per_rank(None)


def test_bytes_fall_with_the_stage() -> None:
    totals = {stage: sum(gpt_plan(stage, MASTER, shard=4).bytes_per_rank(2).values()) for stage in (1, 2, 3)}
    assert totals[1] > totals[2] > totals[3]


def test_plan_prints_axes_groups_and_bytes() -> None:
    text = str(Plan(Layout(shard=2), gpt_plan(3), "32-true", moments=2, notes=("a note",)))
    for part in (
        "2 processes (shard 2), precision 32-true",
        "ZeRO stage 3: optimizer states, gradients and parameters sharded over 2 ranks",
        "3 blocks of 872 parameters in blocks",
        "optimizer states",
        "a note",
    ):
        assert part in text


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (2**30, "1.0 GiB"), (2**51, "2048.0 TiB")]
)
def test_bytes_are_printed_in_the_nearest_unit(count: int, text: str) -> None:
    assert format_bytes(count) == text
