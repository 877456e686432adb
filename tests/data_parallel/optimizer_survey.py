"""Every optimizer of torch and timm on a small transformer with parameters of one, two and three dims."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import timm.optim
import timm.optim.muon
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from tests.harness.fitting import Fit, make_fit
from tests.models.gpt import GPT, batches

STEPS = 3


@dataclass
class Trained:
    """What three steps with an optimizer gave: full parameters, or the error, and how many steps came before it."""

    parameters: dict[str, Tensor]
    steps: int
    error: str = ""


def names() -> list[str]:
    """``torch.X`` for classes of torch.optim, ``timm.x`` for names of timm's registry."""
    classes = [name for name, value in vars(torch.optim).items() if isinstance(value, type)]
    ours = [name for name in classes if issubclass(getattr(torch.optim, name), Optimizer) and name != "Optimizer"]
    return [*(f"torch.{name}" for name in ours), *(f"timm.{name}" for name in timm.optim.list_optimizers())]


class Surveyed(GPT):
    """One optimizer over all parameters; those that torch makes for matrices alone are given the matrices."""

    def __init__(self, optimizer: str) -> None:
        super().__init__(blocks=2)
        self.name = optimizer
        self.mixers = nn.Parameter(torch.randn(2, 16, 16) / 8)
        for block in self.blocks:  # the true gradient of key biases is zero, and rounding would become an update
            block.attention.qkv.bias.requires_grad_(False)

    @override
    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.positions[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x + torch.einsum("btc,ncd->btd", x, self.mixers)))

    @override
    def configure_optimizers(self) -> Any:
        library, _, name = self.name.partition(".")
        trainable = [p for p in self.parameters() if p.requires_grad]
        if library == "timm":
            return timm.optim.create_optimizer_v2(trainable, opt=name, lr=1e-2, weight_decay=0.01)
        return getattr(torch.optim, name)([p for p in trainable if p.dim() == 2 or name != "Muon"], lr=1e-2)


@contextmanager
def newton_schulz_in_fp64() -> Iterator[None]:
    """Inside, Muon's iteration, which is written in bf16, has no rounding to speak of."""
    timm_iteration, to_bf16 = timm.optim.muon.zeropower_via_newtonschulz, torch.Tensor.bfloat16
    defaults = timm_iteration.__defaults__
    timm_iteration.__defaults__ = tuple(torch.float64 if d is torch.bfloat16 else d for d in defaults)
    torch.Tensor.bfloat16 = torch.Tensor.double
    try:
        yield
    finally:
        timm_iteration.__defaults__, torch.Tensor.bfloat16 = defaults, to_bf16


def train_each(optimizers: list[str], strategy: dict[str, Any] | None, world_size: int) -> dict[str, Trained]:
    """A job: every optimizer on its own."""
    with newton_schulz_in_fp64():
        return {name: _train(name, strategy, world_size) for name in optimizers}


def _train(optimizer: str, strategy: dict[str, Any] | None, world_size: int) -> Trained:
    fit = Fit(partial(Surveyed, optimizer), partial(batches, STEPS), strategy, world_size)
    trainer, module, train, validation, watch = make_fit(fit)
    try:
        trainer.fit(module, train, validation)
    except Exception as error:
        return Trained({}, trainer.global_step, f"{type(error).__name__}: {str(error).strip()}")
    return Trained(watch.outcome.parameters[-1], trainer.global_step)
