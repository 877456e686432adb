"""Wherever and however a module is built, training starts from the values that plain construction gives."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from typing_extensions import override

from tests.harness import WorkerError, full_parameters, make_trainer, run_distributed
from tests.harness.fitting import ALL_STAGES

WIDTH, LENGTH, LAYERS, VOCABULARY = 8, 6, 2, 11
SEED = 7


class Positions(nn.Module):
    """A table outside the state dict, a count inside it, and a tensor that is no buffer at all."""

    def __init__(self) -> None:
        super().__init__()
        angles = torch.arange(LENGTH)[:, None] / 10 ** (torch.arange(WIDTH)[None] / WIDTH)
        self.register_buffer("table", angles.sin(), persistent=False)
        self.register_buffer("seen", torch.tensor(3.0))
        self.scale = torch.linspace(0.5, 1.5, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table[: x.shape[1]] * self.scale


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.proj = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.proj(self.up(self.norm(x)).relu())


class Network(nn.Module):
    """All layers as torch initialises them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = Positions()
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.positions(self.embedding(tokens))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class TiedNetwork(Network):
    """The head shares its weight with the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embedding.weight


class CustomNetwork(Network):
    """Initialised as GPT-2: by ``apply``, then the projections into the residual stream once more."""

    def __init__(self) -> None:
        super().__init__()
        self.apply(self._initialise)
        for name, parameter in self.named_parameters():
            if name.endswith("proj.weight"):
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * LAYERS))

    @staticmethod
    def _initialise(module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            module.weight.data.normal_(std=0.02)


class CustomNetworkWithToken(CustomNetwork):
    """Has a parameter of its own, too."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, WIDTH))

    @override
    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) + (self.token**2).sum()


class Module(pl.LightningModule):
    """Builds its network in ``__init__``, or later in ``configure_model``."""

    def __init__(self, network: Callable[[], nn.Module], later: bool = False) -> None:
        super().__init__()
        self.build = network
        self.network: Any = None if later else network()

    @override
    def configure_model(self) -> None:
        if self.network is None:
            self.network = self.build()

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.network(batch).square().mean()

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@dataclass
class Values:
    """Parameters (whole), buffers and the plain tensor, by name."""

    parameters: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    scale: Tensor = field(default_factory=lambda: torch.zeros(()))

    @classmethod
    def of(cls, module: Module) -> Values:
        buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
        return cls(full_parameters(module), buffers, module.network.positions.scale)


class AtStart(pl.Callback):
    """The values with which training starts, as this rank sees them."""

    values: Values

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.values = Values.of(pl_module)  # type: ignore[arg-type]


NETWORKS = (Network, CustomNetworkWithToken)
# name → (build in configure_model, arguments of Trainer.init_module; None: not used)
PLACES: dict[str, tuple[bool, dict[str, Any] | None]] = {
    "init": (False, None),
    "configure_model": (True, None),
    "init_module": (False, {}),
    "empty_init": (False, {"empty_init": True}),
}


def values_at_start(zero_stage: int, network: Callable[[], nn.Module], place: str) -> Values:
    """Runs in a worker: this rank's values when training starts."""
    later, init_module = PLACES[place]
    observer = AtStart()
    trainer = make_trainer({"zero_stage": zero_stage}, 2, callbacks=[observer], max_steps=1)
    pl.seed_everything(SEED, verbose=False)
    with nullcontext() if init_module is None else trainer.init_module(**init_module):
        module = Module(network, later)
    trainer.fit(module, DataLoader(torch.ones(2, LENGTH, dtype=torch.long)))
    return observer.values


def all_values(zero_stage: int) -> dict[tuple[str, str], Values]:
    """Runs in a worker."""
    return {
        (network.__name__, place): values_at_start(zero_stage, network, place)
        for network in NETWORKS
        for place in PLACES
        if network is Network or place != "empty_init"
    }


@cache
def values(zero_stage: int) -> list[dict[tuple[str, str], Values]]:
    return run_distributed(all_values, 2, zero_stage)


def plain(network: Callable[[], nn.Module]) -> Values:
    pl.seed_everything(SEED, verbose=False)
    return Values.of(Module(network))


def assert_same_bits(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert list(ours) == list(theirs)
    assert [name for name, tensor in theirs.items() if not torch.equal(ours[name], tensor)] == []


@ALL_STAGES
@pytest.mark.parametrize("place", PLACES)
def test_layers_start_from_the_bits_of_plain_construction(zero_stage: int, place: str) -> None:
    for rank in values(zero_stage):
        assert_same_bits(rank["Network", place].parameters, plain(Network).parameters)


@ALL_STAGES
@pytest.mark.parametrize("place", ["init", "configure_model", "init_module"])
def test_custom_initialisation_gives_the_bits_of_plain_construction(zero_stage: int, place: str) -> None:
    for rank in values(zero_stage):
        assert_same_bits(rank["CustomNetworkWithToken", place].parameters, plain(CustomNetworkWithToken).parameters)


@ALL_STAGES
@pytest.mark.parametrize("place", PLACES)
def test_buffers_and_plain_tensors_are_those_of_plain_construction_on_every_rank(zero_stage: int, place: str) -> None:
    expected = plain(Network)
    for rank in values(zero_stage):
        assert_same_bits(rank["Network", place].buffers, expected.buffers)
        assert torch.equal(rank["Network", place].scale, expected.scale)


@pytest.mark.parametrize("network", [CustomNetwork, CustomNetworkWithToken])
def test_empty_init_refuses_to_replace_custom_initialisation_by_the_default_one(network: type[nn.Module]) -> None:
    with pytest.raises(WorkerError, match="empty_init") as failure:
        run_distributed(values_at_start, 2, 3, network, "empty_init", timeout=30.0, fresh=True)
    assert failure.value.exception == "TypeError"


@pytest.mark.parametrize("zero_stage", [0, 2], ids=lambda stage: f"zero{stage}")
def test_empty_init_keeps_ties(zero_stage: int) -> None:
    for values in run_distributed(values_at_start, 2, zero_stage, TiedNetwork, "empty_init", timeout=30.0):
        assert "network.head.weight" not in values.parameters, "listed under a name of its own: untied"
