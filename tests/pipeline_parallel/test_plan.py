"""Plans are made without a process group, and refuse what cannot cross a boundary."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_effi.modules.trunk import find_trunk
from lightning_effi.pipeline_parallel.intercept import Interception
from lightning_effi.pipeline_parallel.planning.plan import balanced, plan_stages
from lightning_effi.pipeline_parallel.planning.trace import Trace, trace_step
from tests.models import MODELS
from tests.models.gpt import GPT, Block, batches


def trace_of(module: Any, batch: Any) -> Trace:
    trunk = find_trunk(module)
    interception = Interception(module, trunk.blocks, trunk.units)
    with interception.installed():
        return trace_step(module, trunk, interception, lambda: module.loss(batch))[0]


def plan_of(module: Any, batch: Any, sizes: Any) -> Any:
    trace = trace_of(module, batch)
    first = {id(p): name for name, p in module.named_parameters()}
    names = [*trace.blocks, *trace.units]
    parameters = {name: [first[id(p)] for p in module.get_submodule(name).parameters()] for name in names}
    return plan_stages(trace, parameters, {name: p.numel() for name, p in module.named_parameters()}, sizes)


def test_stages_of_a_tied_gpt() -> None:
    stages, boundaries, shared = plan_of(GPT(tied=True), batches(1, rows=3)[0], 2)
    assert [stage.blocks for stage in stages] == [("blocks.0", "blocks.1"), ("blocks.2", "blocks.3")]
    assert [stage.units for stage in stages] == [("embedding",), ("norm", "head")]
    assert [meta.shape for meta in boundaries[0].metas] == [(3, 12, 16)]
    assert dict(shared) == {"positions": (0, 1), "embedding.weight": (0, 1)}
    assert "embedding.weight" in stages[0].parameters
    assert "blocks.0.norm1.weight" not in stages[1].parameters


def test_module_is_as_before_after_a_trace() -> None:
    module, batch = GPT(), batches(1)[0]
    before = module.loss(batch)
    trace_of(module, batch)
    assert torch.equal(module.loss(batch), before)
    assert not any("forward" in child.__dict__ for child in module.modules())


def test_masks_made_from_the_batch_do_not_cross() -> None:
    pytest.importorskip("transformers")
    case = MODELS["bert"]
    _, boundaries, _ = plan_of(case.module(), case.batches(1)[0], 2)
    assert len(boundaries[0].metas) == 1


def test_a_large_head_weighs_on_its_stage() -> None:
    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(16, 4096), nn.Linear(4096, 17)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(self.up(x))

    class LargeHead(GPT):
        def __init__(self) -> None:
            super().__init__(tied=False)
            self.head = Head()

    stages, _, _ = plan_of(LargeHead(), batches(1)[0], 2)
    assert [len(stage.blocks) for stage in stages] == [3, 1]


@pytest.mark.parametrize(
    ("costs", "parts", "firsts"),
    [([1, 1, 1, 1], 2, [0, 2]), ([1, 1, 1, 5], 2, [0, 3]), ([1] * 7, 4, [0, 1, 3, 5]), ([3, 1, 1, 1], 2, [0, 1])],
)
def test_balance(costs: list[float], parts: int, firsts: list[int]) -> None:
    assert balanced(costs, parts) == firsts


class SkipToHead(GPT):
    detached = False

    def forward(self, tokens: Tensor) -> Tensor:
        start = x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x) + (start.detach() if self.detached else start))


class DetachedSkip(SkipToHead):
    detached = True


class IntegerSkip(GPT):
    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        choice = x.argmax(-1)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) * (choice > 3).float().unsqueeze(-1)


class AuxiliaryLosses(GPT):
    def forward(self, tokens: Tensor) -> Tensor:
        x, self.kept = self.embedding(tokens), []
        for block in self.blocks:
            x = block(x)
            self.kept.append(x.square().mean())
        return self.head(self.norm(x))

    def loss(self, batch: Tensor) -> Tensor:
        return super().loss(batch) + sum(self.kept)


class CalledTwice(GPT):
    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in [*self.blocks, self.blocks[0]]:
            x = block(x)
        return self.head(self.norm(x))


class Decides(GPT):
    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        if x.sum() > 0:
            x = x * 2
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@pytest.mark.parametrize("module", [SkipToHead, DetachedSkip, IntegerSkip, AuxiliaryLosses])
def test_values_that_bypass_a_boundary_are_refused(module: type[GPT]) -> None:
    with pytest.raises(ValueError, match=r"a value computed before 'blocks\.2' is used after it"):
        plan_of(module(), batches(1)[0], 2)


class ComplexStates(GPT):
    class Block(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.real) * torch.polar(torch.ones(16), torch.ones(16))

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.blocks = nn.ModuleList(ComplexStates.Block(16, 4) for _ in range(4))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + 0j
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x.real))


def test_complex_numbers_cannot_cross() -> None:
    with pytest.raises(ValueError, match=r"'blocks\.2' is given complex numbers"):
        plan_of(ComplexStates(), batches(1)[0], 2)


@pytest.mark.parametrize("blocks", [6, 7])
def test_every_parameter_is_held_by_some_stage(blocks: int) -> None:
    module = GPT(blocks=blocks)
    stages, _, shared = plan_of(module, batches(1)[0], 4)
    assert sum(len(stage.blocks) for stage in stages) == blocks
    sizes = {name: p.numel() for name, p in module.named_parameters()}
    copies = sum((len(held) - 1) * sizes[name] for name, held in shared)
    assert sum(stage.numel for stage in stages) - copies == sum(sizes.values())


def test_block_that_is_called_twice_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'blocks\.0' is called twice"):
        plan_of(CalledTwice(), batches(1)[0], 2)


def test_decisions_by_computed_values_are_refused() -> None:
    with pytest.raises(ValueError, match=r"before 'blocks\.0' is called, the step reads a value"):
        plan_of(Decides(), batches(1)[0], 2)


def test_loss_that_is_a_number_in_the_end_is_fine() -> None:
    class Prints(GPT):
        def loss(self, batch: Tensor) -> Tensor:
            loss = super().loss(batch)
            self.seen = float(loss) if loss > 0 else 0.0
            return loss

    assert len(plan_of(Prints(), batches(1)[0], 4)[0]) == 4


class SharedSkip(GPT):
    """The embedding is an argument of every block, as encoder states are in a decoder."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for block in self.blocks:
            block.forward = lambda x, start, block=block: F.gelu(type(block).forward(block, x)) + start

    def forward(self, tokens: Tensor) -> Tensor:
        start = x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, start)
        return self.head(self.norm(x))


def test_arguments_of_every_block_cross_every_boundary() -> None:
    _, boundaries, _ = plan_of(SharedSkip(), batches(1)[0], 4)
    assert [len(boundary.metas) for boundary in boundaries] == [2, 2, 2]
