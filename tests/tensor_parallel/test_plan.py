"""What is split how follows from a run of the block; no process group is needed for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import nn

from lightning_effi import EffiStrategy, TensorParallel
from lightning_effi.tensor_parallel.planning.decide import decide, with_user_plan
from lightning_effi.tensor_parallel.planning.plan import LayerPlan, TensorPlan
from lightning_effi.tensor_parallel.planning.trace import trace_block
from tests.models.gpt import Block
from tests.models.lora import LoRALinear


def styles(block: nn.Module, size: int = 2, *inputs: torch.Tensor) -> dict[str, str]:
    inputs = inputs or (torch.randn(2, 5, 16),)
    groups, _ = decide(block, trace_block(block, inputs, {}), size)
    return {layer.name: str(layer).partition(" (")[0] for group in groups for layer in group.layers}


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up, self.down = nn.Linear(16, 24), nn.Linear(12, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return x + self.down(nn.functional.silu(gate) * up)


class Escaping(nn.Module):
    """Returns hidden states in which the first layer has a share, beside what the second makes of it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.first(x).relu()
        return self.second(hidden), x + hidden


class Normed(nn.Module):
    """A residual stream between two layers, as between two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.first(x)
        return x + self.second(x)


class Cut(nn.Module):
    """Its first layer's output is cut up by ``cut``."""

    def __init__(self, width: int, cut: Callable[[torch.Tensor], Sequence[torch.Tensor]]) -> None:
        super().__init__()
        self.first, self.second, self.cut = nn.Linear(16, width), nn.Linear(8, 16), cut

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.cut(self.first(x))
        return x + self.second(sum(part.flatten(2)[..., :8] for part in parts))


# name → (outputs of the layer, how they are cut up, the pieces)
CUTS: dict[str, tuple[int, Callable[[torch.Tensor], Sequence[torch.Tensor]], tuple[int, ...]]] = {
    "chunk": (24, lambda y: y.chunk(3, dim=-1), (8, 8, 8)),
    "slices": (24, lambda y: (y[:, :, :8], y[:, :, 8:16], y[:, :, -8:]), (8, 8, 8)),
    "slices of the end": (24, lambda y: (y[..., :-16], y[..., -16:-8], y[..., -8:]), (8, 8, 8)),
    "narrow": (24, lambda y: [y.narrow(-1, start, 8) for start in (0, 8, 16)], (8, 8, 8)),
    "pieces of pieces": (32, lambda y: (y[..., :8], *y[..., 8:].split([8, 16], -1)[1].chunk(2, -1)), (8, 8, 8, 8)),
    "view": (24, lambda y: y.view(2, 5, 3, 8).unbind(2), (8, 8, 8)),
    "view of heads": (24, lambda y: list(y.view(2, 5, 3, 2, 4).permute(2, 0, 1, 3, 4)), (8, 8, 8)),
    "groups of heads": (32, lambda y: (y.view(2, 5, 8, 4)[:, :, :4], y.view(2, 5, 8, 4)[:, :, 4:6]), (16, 8, 8)),
    "glu": (16, lambda y: (nn.functional.glu(y),), (8, 8)),
    "heads only": (24, lambda y: (y.view(2, 5, 3, 8).transpose(1, 2).transpose(1, 2),), (24,)),
    "within heads": (24, lambda y: y.view(2, 5, 2, 12).chunk(3, dim=-1), (24,)),
}


@pytest.mark.parametrize("name", CUTS)
def test_pieces_follow_from_how_outputs_are_cut(name: str) -> None:
    width, cut, pieces = CUTS[name]
    found = trace_block(Cut(width, cut), (torch.randn(2, 5, 16),), {}).pieces.get("first", (width,))
    assert found == pieces


def test_packed_attention_and_mlp_are_recognised() -> None:
    assert styles(Block(16, 4)) == {
        "attention.qkv": "column_packed:3", "attention.proj": "row", "mlp.0": "column", "mlp.2": "row",
    }  # fmt: skip


def test_packed_gate_is_recognised() -> None:
    assert styles(Gated()) == {"gate_up": "column_packed:2", "down": "row"}


def test_adapters_follow_their_layer() -> None:
    block = Block(16, 4)
    block.attention.qkv = LoRALinear(block.attention.qkv)
    block.attention.proj = LoRALinear(block.attention.proj)
    found = styles(block)
    assert found["attention.qkv.base"] == found["attention.qkv.up"] == "column_packed:3"
    assert found["attention.proj.base"] == found["attention.proj.down"] == "row"
    assert "attention.qkv.down" not in found
    assert "attention.proj.up" not in found


@pytest.mark.parametrize("block", [Escaping(), Normed(), nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16))])
def test_what_cannot_be_paired_stays_whole(block: nn.Module) -> None:
    assert styles(block) == {}


def test_widths_that_do_not_divide_are_named() -> None:
    block = Block(16, 4)
    block.mlp = nn.Sequential(nn.Linear(16, 18), nn.GELU(), nn.Linear(18, 16))
    groups, whole = decide(block, trace_block(block, (torch.randn(2, 5, 16),), {}), 4)
    assert [layer.name for group in groups for layer in group.layers] == ["attention.proj", "attention.qkv"]
    assert "mlp.0, mlp.2: the outputs of mlp.0 (18) are not divisible by 4" in whole


def test_plan_prints_layers_reasons_and_sizes() -> None:
    layers = (
        LayerPlan("h.0.qkv", "column", (8, 8, 8), "feeds proj"),
        LayerPlan("h.1.qkv", "column", (8, 8, 8), "feeds proj"),
    )
    text = str(TensorPlan(2, layers, replicated=("head: not in a block",), total=100, per_rank=60, whole=20))
    assert "tensor parallelism over 2 ranks: 60 of 100 parameters per rank, 20 of them on every rank" in text
    assert "h.*.qkv: column_packed:3 (feeds proj) x 2" in text
    assert "stays whole: head: not in a block" in text


def test_user_plan_overrides_what_is_derived() -> None:
    block = Block(16, 4)
    groups, _ = decide(block, trace_block(block, (torch.randn(2, 5, 16),), {}), 2)
    asked = {"h.*.attention.qkv": "column_packed:16,16,16", "h.*.mlp.*": "replicate"}
    [group] = with_user_plan(groups, "h.0", block, asked, 2)
    assert {layer.name: layer.style for layer in group.layers} == {"attention.qkv": "column", "attention.proj": "row"}
    with pytest.raises(ValueError, match=r"'h.0.attention.qkv': the pieces 5 .* do not make up the 48 outputs"):
        with_user_plan(groups, "h.0", block, {"h.0.attention.qkv": "column_packed:5"}, 2)
    with pytest.raises(ValueError, match=r"'h.0.mlp.0' cannot be column: 64 is not divisible by .*=3"):
        with_user_plan(groups, "h.0", block, {"h.0.mlp.0": "column"}, 3)


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        ({"plan": {"*.qkv": "columns"}}, "unknown style 'columns'.*column, row, column_gather"),
        ({"plan": "derived"}, 'must be "auto" or a mapping'),
        ({"sequence_parallel": "yes"}, "tensor.sequence_parallel"),
    ],
)
def test_bad_settings_are_refused_at_construction(tensor: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EffiStrategy(tensor_parallel_size=2, tensor=tensor)


def test_details_without_tensor_parallelism_are_refused() -> None:
    with pytest.raises(ValueError, match="has no effect with tensor_parallel_size=1"):
        EffiStrategy(tensor=TensorParallel())
