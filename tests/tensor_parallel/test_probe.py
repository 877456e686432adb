"""A plan that gives wrong numbers is found out by every rank before the first step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode

from lightning_effi.tensor_parallel.layers import apply
from lightning_effi.tensor_parallel.layers.apply import AppliedPlan
from lightning_effi.tensor_parallel.planning.decide import decide
from lightning_effi.tensor_parallel.planning.plan import LayerPlan
from lightning_effi.tensor_parallel.planning.probe import BlockProbe, Verdict
from lightning_effi.tensor_parallel.planning.trace import trace_block
from lightning_effi.tensor_parallel.rules import elementwise, layers, reductions
from tests.harness import run_distributed
from tests.models.gpt import Block
from tests.models.hugging_face import llama_model

X = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0))


def mesh() -> Any:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))


def judge_block(layers: list[LayerPlan] | None = None) -> Verdict:
    torch.manual_seed(0)
    block = Block(16, 4)
    if layers is None:
        groups, _ = decide(block, trace_block(block, (X,), {}), 2)
        layers = [layer for group in groups for layer in group.layers]
    tp = mesh()
    return BlockProbe(block, (X,), {}, tp, tp.get_group()).judge(layers)


def test_derived_plan_passes_without_gathering() -> None:
    assert run_distributed(judge_block, 2) == [Verdict(True)] * 2


def test_wrong_permutation_is_found_out_on_every_rank() -> None:
    wrong = [LayerPlan("attention.qkv", "column", (32, 16)), LayerPlan("attention.proj", "row")]
    for verdict in run_distributed(judge_block, 2, wrong, fresh=True):
        assert not verdict.passed
        assert "not its pieces" in verdict.reason
        assert verdict.sources == {"attention.qkv"}


def judge_qwen(broken: bool) -> Verdict:
    from transformers import Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

    torch.manual_seed(0)
    config = Qwen3Config(hidden_size=16, num_attention_heads=4, num_key_value_heads=2, head_dim=4)
    config._attn_implementation = "sdpa"
    block = Qwen3Attention(config, 0)
    for norm in (block.q_norm, block.k_norm):
        torch.nn.init.normal_(norm.weight)
    table = torch.randn(2, 2, 5, 4, generator=torch.Generator().manual_seed(1))
    kwargs = {"hidden_states": X, "position_embeddings": (table[0], table[1]), "attention_mask": None}
    groups, _ = decide(block, trace_block(block, (), kwargs), 2)
    tp = mesh()
    probe = BlockProbe(block, (), kwargs, tp, tp.get_group())
    if broken:  # the norms' weights no longer get what all ranks' heads pull on them
        elementwise.aligned = lambda tensor, *_: tensor
        reductions.share_all = lambda tensors, _: list(tensors)
    return probe.judge([layer for group in groups for layer in group.layers])


def test_missing_sum_of_a_norms_gradient_is_found_out_on_every_rank() -> None:
    pytest.importorskip("transformers")
    assert [verdict.passed for verdict in run_distributed(judge_qwen, 2, False)] == [True, True]
    for verdict in run_distributed(judge_qwen, 2, True, fresh=True):
        assert not verdict.passed
        assert "is off by" in verdict.reason


def judge_sequence(broken: str) -> Verdict:
    torch.manual_seed(0)
    block = Block(16, 4)
    groups, _ = decide(block, trace_block(block, (X,), {}), 2)
    tp = mesh()
    if broken == "norm":  # its weight has the gradient of this rank's positions only
        reductions.share_all = lambda tensors, _: list(tensors)
    elif broken == "bias":  # each rank adds it
        layers.contribute = lambda tensor, _: tensor
    probe = BlockProbe(block, (X,), {}, tp, tp.get_group())
    return probe.judge([layer for group in groups for layer in group.layers], sequence_dim=1)


def test_wrong_sums_over_positions_are_found_out_on_every_rank() -> None:
    assert run_distributed(judge_sequence, 2, "") == [Verdict(True)] * 2
    for broken in ("norm", "bias"):
        for verdict in run_distributed(judge_sequence, 2, broken, fresh=True):
            assert not verdict.passed
            assert "is off by" in verdict.reason


def wrong_on_one_rank() -> Verdict:
    if dist.get_rank() == 1:
        original = apply.take
        apply.take = lambda *args: original(*args) * 1.01
    row = [LayerPlan("mlp.0", "column_gather", (64,)), LayerPlan("mlp.2", "row")]
    return judge_block(row)


def test_verdict_is_that_of_all_ranks() -> None:
    assert [verdict.passed for verdict in run_distributed(wrong_on_one_rank, 2, fresh=True)] == [False, False]


def count_messages(frozen: bool) -> tuple[int, int]:
    model = llama_model().requires_grad_(not frozen)
    block = model.model.layers[0]
    x = torch.randn(2, 5, 32, requires_grad=True)
    table = model.model.rotary_emb(x, torch.arange(5)[None])
    kwargs = {"position_embeddings": table, "attention_mask": None}
    groups, _ = decide(block, trace_block(block, (x,), kwargs), 2)
    AppliedPlan(block, [layer for group in groups for layer in group.layers], mesh())
    with CommDebugMode() as forward:
        output = block(x, **kwargs)
    with CommDebugMode() as backward:
        output.sum().backward()
    return forward.get_total_counts(), backward.get_total_counts()


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
def test_a_llama_block_sends_two_messages_in_each_direction(frozen: bool) -> None:
    pytest.importorskip("transformers")
    assert run_distributed(count_messages, 2, frozen) == [(2, 2)] * 2
