"""Optimizers of every make and with groups formed by any rule update the parameters that they update in one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, AdamW, Optimizer
from typing_extensions import override

from tests.harness.fitting import ALL_STAGES, Fit, Outcome
from tests.harness.several_fits import assert_outcomes_equal, fit_several, single_processes
from tests.models.gpt import GPT, batches

STEPS = 3
# Large enough that a parameter in the wrong group ends elsewhere in the first digit.
DECAY = 0.2


def two_groups(decayed: list[Tensor], others: list[Tensor]) -> Optimizer:
    assert decayed
    assert others
    groups = [{"params": decayed, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}]
    return SGD(groups, lr=0.3, momentum=0.9)


def by_name(module: GPT) -> Optimizer:
    named = list(module.named_parameters())
    plain = [name for name, _ in named if name.endswith("bias") or "norm" in name]
    return two_groups([p for name, p in named if name not in plain], [p for name, p in named if name in plain])


def by_type(module: GPT) -> Optimizer:
    """The walk of minGPT, with its check that every parameter is in exactly one set."""
    decayed, others = set(), {"positions"}
    for module_name, submodule in module.named_modules():
        for name, _ in submodule.named_parameters(recurse=False):
            full_name = f"{module_name}.{name}" if module_name else name
            if name == "weight" and isinstance(submodule, nn.Linear):
                decayed.add(full_name)
            elif name == "bias" or isinstance(submodule, (nn.LayerNorm, nn.Embedding)):
                others.add(full_name)
    decayed.discard("head.weight")  # tied to the embedding, under whose name it is listed
    named = dict(module.named_parameters())
    assert not decayed & others
    assert not named.keys() - (decayed | others)
    return two_groups([named[name] for name in sorted(decayed)], [named[name] for name in sorted(others)])


def by_dims(module: GPT) -> Optimizer:
    parameters = list(module.parameters())
    return two_groups([p for p in parameters if p.dim() >= 2], [p for p in parameters if p.dim() < 2])


def by_depth(module: GPT) -> Optimizer:
    """A learning rate for each block and another one for the rest, under AdamW."""
    blocks = [{"params": list(block.parameters()), "lr": 1e-3 * (i + 1)} for i, block in enumerate(module.blocks)]
    inside = {id(p) for group in blocks for p in group["params"]}
    rest = {"params": [p for p in module.parameters() if id(p) not in inside], "weight_decay": DECAY}
    # The true gradient of a key bias is zero; a large eps keeps its rounding noise from becoming an update.
    return AdamW([*blocks, rest], lr=5e-3, eps=1e-4, amsgrad=True)


def with_state_from_the_start(module: GPT) -> Optimizer:
    return Adagrad(module.parameters(), lr=0.05, initial_accumulator_value=0.01, weight_decay=DECAY)


class Momentum(Optimizer):
    """An optimizer that nobody knows, written with tensor methods."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @override
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                velocity = self.state[parameter].setdefault("velocity", torch.zeros_like(parameter))
                velocity.mul_(0.5).add_(parameter.grad)
                # the norm of the whole parameter, as in LARS
                parameter.add_(velocity * (parameter.norm() + 1).log(), alpha=-group["lr"])
        return loss


class Lookahead(Optimizer):
    """Pulls the weights back to a slow copy every second step (arXiv:1907.08610); shares groups with its inner one."""

    def __init__(self, inner: Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner
        self.steps = 0

    @override
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = self.inner.step(closure)
        self.steps += 1
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    slow = self.state[parameter].setdefault("slow", parameter.detach().clone())
                    if self.steps % 2 == 0:
                        slow.lerp_(parameter, 0.5)
                        parameter.copy_(slow)
        return loss


def lookahead(module: GPT) -> Optimizer:
    return Lookahead(by_name(module))


def unknown(module: GPT) -> Optimizer:
    return Momentum(module.parameters(), lr=0.3)


class Optimized(GPT):
    """Makes its optimizer by ``rule``, in ``configure_optimizers`` or already in ``__init__``."""

    def __init__(self, rule: Callable[[GPT], Optimizer], early: bool = False) -> None:
        super().__init__(blocks=2)
        self.original = [(name, type(p), tuple(p.shape)) for name, p in self.named_parameters()]
        self.rule = rule
        self.made: Optimizer | None = rule(self) if early else None

    @override
    def configure_optimizers(self) -> Any:
        assert [(name, type(p), tuple(p.shape)) for name, p in self.named_parameters()] == self.original
        return self.made or self.rule(self)


CASES: dict[str, Callable[[], Optimized]] = {
    "groups by name": partial(Optimized, by_name),
    "groups by type": partial(Optimized, by_type),
    "groups by dims": partial(Optimized, by_dims),
    "learning rate by depth": partial(Optimized, by_depth),
    "made in init": partial(Optimized, by_name, early=True),
    "state made at construction": partial(Optimized, with_state_from_the_start),
    "optimizer inside an optimizer": partial(Optimized, lookahead),
    "optimizer of the user's own": partial(Optimized, unknown),
}


def runs(zero_stage: int) -> dict[str, Fit]:
    return {name: Fit(module, partial(batches, STEPS), {"zero_stage": zero_stage}) for name, module in CASES.items()}


@cache
def outcomes(zero_stage: int) -> dict[str, list[Outcome]]:
    return fit_several(runs(zero_stage))


@ALL_STAGES
@pytest.mark.parametrize("case", CASES)
def test_updates_equal_single_process(zero_stage: int, case: str) -> None:
    assert_outcomes_equal(outcomes(zero_stage)[case], single_processes(runs(zero_stage))[case])
