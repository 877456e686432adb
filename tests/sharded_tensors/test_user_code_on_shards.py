"""Code of a module that holds, reads, writes or draws parameters outside forward, as in a single process."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.harness import WorkerError
from tests.harness.fitting import Fit, Outcome, fit
from tests.harness.several_fits import assert_outcomes_equal, fit_several, single_processes
from tests.models.gpt import GPT, batches


class Untied(GPT):
    def __init__(self) -> None:
        super().__init__(tied=False, blocks=2)

    @property
    def hidden(self) -> nn.Linear:
        return self.blocks[0].mlp[0]  # type: ignore[return-value, index]


class HoldsParameters(Untied):
    """Takes hold of parameters before they are sharded: for clipping, for a penalty, and as a second use of one."""

    def __init__(self) -> None:
        super().__init__()
        self.held = list(self.blocks.parameters())
        self.shared = [self.head.weight]

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        penalty = sum(parameter.square().sum() for parameter in self.held)
        return loss + 0.01 * penalty + 0.01 * self.shared[0].abs().sum()  # type: ignore[no-any-return]

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        nn.utils.clip_grad_norm_(self.held, 0.05)


class Aliases(Untied):
    """Has further names for its blocks, their parts and other modules, and uses them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.last, self.table = self.blocks, self.blocks[-1], self.embedding
        self.part = self.blocks[0].mlp
        self.mixers = nn.ModuleList(block.attention for block in self.blocks)  # type: ignore[union-attr]

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens) + self.positions[: tokens.shape[1]]
        for block in self.layers[:-1]:
            x = block(x)
        return self.head(self.norm(self.last(x)))  # type: ignore[no-any-return]


class NotesOnParameters(Untied):
    """Hooks on gradients, and attributes of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight.register_hook(lambda gradient: gradient * 0.5)
        for parameter in self.blocks.parameters():
            parameter.factor = 0.1  # type: ignore[attr-defined]

    def on_train_start(self) -> None:
        self.hidden.weight.register_hook(lambda gradient: gradient.clone().fill_(0.01))
        self.norm.weight.register_hook(lambda gradient: gradient * 0).remove()

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        for parameter in self.parameters():
            parameter.grad *= getattr(parameter, "factor", 1.0)  # type: ignore[operator]


class SetsData(Untied):
    """Rebinds ``.data`` in hooks and in the step; what it kept of the old data does not change."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if batch_idx < 2:
            self.hidden.weight.data = self.hidden.weight.data.clamp(-0.1, 0.1)
        return super().training_step(batch, batch_idx)

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        kept = [parameter.data for parameter in self.parameters()]
        for parameter in self.parameters():
            parameter.data = parameter.data * 0.9
        self.head.weight.data = kept[-1]

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.head.weight.grad.data = self.head.weight.grad.data * 0.5


class WritesParts(Untied):
    """Writes into rows and elements of parameters and gradients, and copies plain tensors into them."""

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.embedding.weight.grad[0].zero_()
        self.head.weight.grad[5:].mul_(0.1)
        self.hidden.weight.grad *= torch.arange(len(self.hidden.weight), dtype=torch.float64)[:, None] / 10

    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            self.head.weight[2].fill_(0.3)
            self.head.weight[torch.tensor([1, 12])] = 0.1
            self.embedding.weight[self.embedding.weight > 0.2] = 0.2
            self.hidden.weight[3:9, 1] = torch.arange(6, dtype=torch.float64) / 10
            nn.init.eye_(self.blocks[1].attention.proj.weight)
            vector = nn.utils.parameters_to_vector(self.norm.parameters())
            nn.utils.vector_to_parameters(vector * 0.9, self.norm.parameters())


class Draws(Untied):
    """Draws new weights and noise."""

    def on_train_start(self) -> None:
        torch.manual_seed(5)
        nn.init.xavier_uniform_(self.head.weight)
        nn.init.orthogonal_(self.blocks[0].attention.proj.weight)
        self.hidden.reset_parameters()
        self.embedding.weight.data[3:5].normal_(0, 0.1)

    def on_after_backward(self) -> None:
        torch.manual_seed(6 + self.global_step)
        for parameter in self.parameters():
            parameter.grad += 0.01 * torch.randn_like(parameter)  # type: ignore[operator]


class Averages(Untied):
    """A moving average in plain tensors, made before sharding, whose values end up in the module."""

    def __init__(self) -> None:
        super().__init__()
        self.average = {name: p.detach().clone().double() for name, p in self.named_parameters()}

    @torch.no_grad()
    def on_train_batch_end(self, *_: Any) -> None:
        for name, parameter in self.named_parameters():
            parameter.mul_(0.5).add_(self.average[name].mul_(0.9).add_(parameter, alpha=0.1), alpha=0.5)


class LoadsPlain(Untied):
    def on_train_start(self) -> None:
        self.hidden.load_state_dict({"weight": torch.full((64, 16), 0.02), "bias": torch.ones(64)})


class ClearsParameters(Untied):
    """Lightning's hook is overridden; gradients are read right before."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: torch.optim.Optimizer) -> None:
        assert batch_idx == 0 or self.head.weight.grad is not None
        for parameter in self.parameters():
            parameter.grad = None


class GradientPenalty(Untied):
    """Takes gradients with respect to hidden states, and differentiates them."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = hidden = (self.embedding(batch[:, :-1]) + self.positions).detach().requires_grad_()
        for block in self.blocks:
            hidden = block(hidden)
        energy = self.head(self.norm(hidden)).square().mean(dim=(1, 2)).sum()
        [gradient] = torch.autograd.grad(energy, x, create_graph=True)
        return super().training_step(batch, batch_idx) + gradient.square().sum(dim=(1, 2)).mean()


class PlainBackward(Untied):
    """Manual optimization with ``loss.backward()``."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:  # type: ignore[override]
        optimizer = self.optimizers()
        optimizer.zero_grad()  # type: ignore[union-attr]
        super().training_step(batch, batch_idx).backward()
        nn.utils.clip_grad_norm_(self.parameters(), 0.1)
        optimizer.step()  # type: ignore[union-attr]


class OwnScaler(GPT):
    """Scales its loss itself; in the second step a gradient that one rank holds overflows, and no rank updates."""

    def __init__(self) -> None:
        super().__init__(tied=False)
        self.automatic_optimization = False
        self.scaler = torch.amp.GradScaler("cpu", init_scale=256.0)

    def training_step(self, batch: Tensor, batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(self.scaler.scale(loss))
        if batch_idx == 1:
            self.blocks[0].mlp[0].weight.grad[-1] = torch.inf
        self.scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(self.parameters(), 1.0)
        if batch_idx == 1:
            self.blocks[0].mlp[0].weight.grad.nan_to_num_(0.0, 0.0, 0.0)
        self.scaler.step(optimizer)
        self.scaler.update()
        self.log("scale", self.scaler.get_scale())


MODULES = [
    OwnScaler,
    Aliases,
    HoldsParameters,
    NotesOnParameters,
    SetsData,
    WritesParts,
    Draws,
    Averages,
    LoadsPlain,
    ClearsParameters,
    GradientPenalty,
    PlainBackward,
]
STAGES = [pytest.param(1, marks=pytest.mark.full), 2, 3]


def runs(zero_stage: int) -> dict[str, Fit]:
    return {kind.__name__: Fit(kind, partial(batches, 3), {"zero_stage": zero_stage}) for kind in MODULES}


@cache
def outcomes(zero_stage: int) -> dict[str, list[Outcome]]:
    return fit_several(runs(zero_stage))


@pytest.mark.parametrize("zero_stage", STAGES)
@pytest.mark.parametrize("name", [kind.__name__ for kind in MODULES])
def test_user_code_has_the_effect_of_one_process(name: str, zero_stage: int) -> None:
    assert_outcomes_equal(outcomes(zero_stage)[name], single_processes(runs(zero_stage))[name])


class ReplacesParameter(Untied):
    def on_train_start(self) -> None:
        self.head.weight = nn.Parameter(torch.ones(17, 16, dtype=torch.float64))


class AccumulationHook(Untied):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight.register_post_accumulate_grad_hook(lambda parameter: None)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (ReplacesParameter, "'head.weight' was replaced .* setup"),
        (AccumulationHook, "'head.weight' has a hook .* on_after_backward"),
    ],
)
def test_what_cannot_follow_is_refused_with_a_way_out(module: type[GPT], message: str) -> None:
    with pytest.raises(WorkerError, match=f"(?s){message}"):
        fit(Fit(module, partial(batches, 1), {"zero_stage": 2}))
