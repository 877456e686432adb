"""The two halves of a backward give the gradients of the whole, at the cost of the whole."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from lightning_effi.pipeline_parallel.running.backward import backward_of_inputs, differentiable
from tests.models.gpt import Block

WIDTH = 16


class Blocks(nn.Module):
    """What a stage in the middle is."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(WIDTH, 4), Block(WIDTH, 4))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return (self.blocks(x),)


class Checkpointed(Blocks):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return (x,)


class UsedTwice(nn.Module):
    """A weight at two places of the path, one behind the other, and beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)
        self.other = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        x = (x @ self.weight).tanh()
        return (self.other(x @ self.weight * self.weight.sum()),)


class Decoder(nn.Module):
    """Parameters that no received value comes before: an embedding, whose output meets what was received only later."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, WIDTH)
        self.own, self.cross = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        tokens = torch.arange(x.shape[1]) % 5
        return (self.own(self.embedding(tokens)) + self.cross(x),)


class BesideThePath(Decoder):
    """An output that depends on nothing received, as a position bias."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        bias = self.own(self.embedding(torch.arange(5)))
        return (self.cross(x) + bias.mean(), bias, torch.arange(3))


class Hooked(Blocks):
    """Hooks on tensors inside, which must not act twice."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        for block in self.blocks:
            x = block(x)
            x.register_hook(lambda gradient: 3 * gradient)
            y = nn.functional.linear(x, block.mlp[0].weight)
            y.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
            x = x + y[..., :WIDTH]
        return (x,)


class Frozen(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].requires_grad_(False)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return (self.conv(self.rnn(x)[0].transpose(1, 2)),)


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, 4, 32, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return (self.layer(x),)


def gradients(module: nn.Module, run: Callable[..., Any]) -> dict[str, Tensor | None]:
    torch.manual_seed(2)
    module.zero_grad()
    x = torch.randn(3, 8, WIDTH, requires_grad=True)
    outputs = module(x.view_as(x))
    sent = [torch.randn_like(output) for output in outputs if output.is_floating_point()]
    run(*differentiable(outputs, sent), [x])
    return {"input": x.grad, **{name: parameter.grad for name, parameter in module.named_parameters()}}


def whole(outputs: list[Tensor], sent: list[Tensor], inputs: list[Tensor]) -> None:
    torch.autograd.backward(outputs, sent)


def halves(outputs: list[Tensor], sent: list[Tensor], inputs: list[Tensor]) -> None:
    later = backward_of_inputs(outputs, sent, inputs)
    assert inputs[0].grad is not None
    later()


@pytest.mark.parametrize(
    "kind",
    [Blocks, Checkpointed, UsedTwice, Decoder, BesideThePath, Hooked, Frozen, Recurrent, Attends],
    ids=lambda kind: kind.__name__,
)
def test_halves_add_up_to_the_whole(kind: type[nn.Module]) -> None:
    torch.manual_seed(1)
    module = kind().double()
    torch.set_default_dtype(torch.float64)
    try:
        expected, found = gradients(module, whole), gradients(module, halves)
    finally:
        torch.set_default_dtype(torch.float32)
    for name, gradient in expected.items():
        if gradient is None:
            assert found[name] is None, name
        else:
            torch.testing.assert_close(found[name], gradient, rtol=1e-12, atol=1e-12, msg=name)


def test_gradients_of_weights_come_in_the_second_half_alone() -> None:
    module, seen = Blocks(), {}

    def run(outputs: list[Tensor], sent: list[Tensor], inputs: list[Tensor]) -> None:
        later = backward_of_inputs(outputs, sent, inputs)
        seen["early"] = [name for name, parameter in module.named_parameters() if parameter.grad is not None]
        later()

    assert all(gradient is not None for gradient in gradients(module, run).values())
    assert seen["early"] == []


def test_nothing_is_computed_twice() -> None:
    module, counts = Blocks(), []

    def counted(run: Callable[..., None]) -> Callable[..., None]:
        def counting(*args: Any) -> None:
            with FlopCounterMode(display=False) as counter:
                run(*args)
            counts.append(counter.get_total_flops())

        return counting

    for run in (whole, halves):
        gradients(module, counted(run))
    assert counts[0] == counts[1] > 0


def test_a_stage_that_received_nothing_does_all_at_once() -> None:
    module = nn.Linear(4, 4)
    later = backward_of_inputs([module(torch.ones(2, 4)).sum()], None, [])
    assert module.weight.grad is not None
    later()
    torch.testing.assert_close(module.weight.grad, torch.full((4, 4), 2.0))


def test_a_loss_starts_without_gradients() -> None:
    module, x = nn.Linear(4, 4), torch.ones(2, 4, requires_grad=True)
    backward_of_inputs([module(x).sum()], None, [x])()
    torch.testing.assert_close(module.weight.grad, torch.full((4, 4), 2.0))


class Marker:
    """Something that can be seen to be gone."""


class Marked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, held: list[Marker]) -> Tensor:
        ctx.marker = held[0]
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient, None


def test_what_the_second_half_does_not_need_is_freed() -> None:
    held = [Marker()]
    marker = weakref.ref(held[0])
    module, x = nn.Linear(4, 4), torch.ones(2, 4, requires_grad=True)
    later = backward_of_inputs([Marked.apply(module(x), held).sum()], None, [x])
    held.clear()
    assert marker() is None
    later()
    assert module.weight.grad is not None
