"""Lightning's two package names, and strategies that are asked for by name."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import pytorch_lightning as older
import torch
from lightning.pytorch.strategies import StrategyRegistry
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_effi
from tests.harness import run_isolated

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "precision": "64-true",
    "max_steps": 2,
}


def module(package: Any) -> Any:
    class Blocks(package.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.Sequential(
                *[nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)) for _ in range(4)]
            )

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return self.blocks(batch).pow(2).mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.1)

    torch.manual_seed(3)
    return Blocks().double()  # as forked processes hand the weights back


def weights(package: Any, strategy: Any, processes: int, **flags: Any) -> dict[str, Tensor]:
    rows = torch.randn(8, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    if processes == 2:
        flags["use_distributed_sampler"] = False  # both work on the same rows
    fitted = module(package)
    trainer = package.Trainer(strategy=strategy, devices=processes, **(QUIET | flags))
    trainer.fit(fitted, DataLoader(rows, batch_size=4))
    return {name: value.detach().clone() for name, value in fitted.named_parameters()}


def fit_under_the_older_name() -> list[dict[str, Tensor]]:
    from lightning_effi import pytorch_lightning as effi

    single = weights(older, "auto", 1)
    layouts: list[dict[str, Any]] = [{"zero_stage": 2}, {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}]
    several = [
        weights(older, effi.EffiStrategy(start_method="fork", **layout), 2, callbacks=[effi.HealthCheck()])
        for layout in layouts
    ]
    plugin = weights(older, effi.EffiStrategy(), 1, plugins=[effi.EffiPrecision("64-true")], precision=None)
    return [single, *several, plugin, weights(older, "effi_zero1", 1)]


def test_the_trainer_of_the_older_name_trains_with_the_same_package() -> None:
    single, *others = run_isolated(fit_under_the_older_name, timeout=120.0)
    for other in others:
        for name, value in single.items():
            torch.testing.assert_close(other[name], value, rtol=1e-9, atol=1e-12)


def test_its_classes_are_those_of_the_older_name() -> None:
    from lightning_effi import pytorch_lightning as effi
    from lightning_effi.pytorch_lightning import strategy
    from lightning_effi.pytorch_lightning.cli import STRATEGY_CLASS_PATH

    assert sorted(effi.__all__) == sorted(lightning_effi.__all__)
    assert strategy.EffiStrategy is effi.EffiStrategy is not lightning_effi.EffiStrategy
    assert issubclass(effi.EffiStrategy, older.strategies.Strategy)
    assert issubclass(effi.EffiPrecision, older.plugins.Precision)
    assert issubclass(effi.HealthCheck, older.Callback)
    assert STRATEGY_CLASS_PATH == "lightning_effi.pytorch_lightning.EffiStrategy"
    assert set(strategies(StrategyRegistry)) <= set(strategies(older.strategies.StrategyRegistry))


def strategies(registry: Any) -> list[str]:
    return [name for name in registry.available_strategies() if name.startswith("effi")]


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: older.Trainer(strategy=lightning_effi.EffiStrategy(), **QUIET),
        lambda: older.Trainer(plugins=[lightning_effi.EffiPrecision("bf16-mixed")], **(QUIET | {"precision": None})),
        lambda: older.Trainer(callbacks=[lightning_effi.HealthCheck()], devices=1, **QUIET).fit(module(older)),
    ],
    ids=["strategy", "precision", "callback"],
)
def test_what_belongs_to_the_other_name_says_what_to_import(wrong: Any) -> None:
    with pytest.raises((ValueError, older.utilities.exceptions.MisconfigurationException)) as error:
        wrong()
    assert "lightning_effi.pytorch_lightning has it for pytorch_lightning.Trainer" in str(error.value)


def test_classes_of_the_older_name_say_where_the_newer_are() -> None:
    from lightning_effi import pytorch_lightning as effi

    with pytest.raises(ValueError, match=r"lightning_effi has it for lightning\.pytorch\.Trainer"):
        pl.Trainer(strategy=effi.EffiStrategy(), **QUIET)
    with pytest.raises(TypeError, match=r"plugin pytorch_lightning\.\S*MixedPrecision"):
        lightning_effi.EffiStrategy(precision_plugin=older.plugins.MixedPrecision("bf16-mixed", "cpu"))


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("effi_tp2", (2, 1)),
        ("effi_tp8", (8, 1)),
        ("effi_pp4", (1, 4)),
        ("effi_tp2_pp2", (2, 2)),
        ("effi_zero3", (1, 1)),
    ],
)
def test_layouts_have_names(name: str, sizes: tuple[int, int]) -> None:
    trainer = pl.Trainer(strategy=name, devices=sizes[0] * sizes[1], **QUIET)
    assert isinstance(trainer.strategy, lightning_effi.EffiStrategy)
    layout = trainer.strategy.layout
    assert (layout.tensor, layout.pipeline) == sizes
    assert trainer.strategy.config.zero_stage == (3 if name == "effi_zero3" else 2)
