"""What a precision cannot do, or what two settings contradict, ends with what to change."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader

from lightning_effi import EffiPrecision, EffiStrategy
from lightning_effi.precision import hardware
from tests.harness import BatchList
from tests.models.gpt import GPT, batches


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"precision": "16"}, "precision must be one of '32-true', '64-true', 'bf16-mixed'"),
        ({"precision": "bf16-mixed", "init_scale": 2.0}, "init_scale only has an effect with 16-bit float"),
        ({"precision": "32-true", "hysteresis": 2, "min_scale": 2.0}, "hysteresis, min_scale only has an effect"),
        ({"precision": "16-true", "growth_interval": 5}, "set master_weights=True"),
        ({"precision": "16-mixed", "master_weights": True}, "adds an fp32 copy to 'bf16-true' and '16-true'"),
        ({"precision": "16-true", "keep_fp32": ["*norm*"]}, "'16-true' with master_weights=True"),
        ({"precision": "bf16-mixed", "clamp_activations": 1e4}, "clamp_activations only has an effect with 16-bit"),
        ({"precision": "16-mixed", "clamp_activations": 1e5}, "between 0 and 65504"),
        ({"precision": "16-mixed", "clamp_activations": -1.0}, "between 0 and 65504"),
        ({"precision": "16-mixed", "backoff_factor": 2}, "backoff_factor must be at most 1"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_settings_are_refused_at_construction(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        EffiPrecision(**settings)
    assert message in str(caught.value)


def fit(module: pl.LightningModule, **settings: Any) -> pl.Trainer:
    flags: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, strategy=EffiStrategy(), plugins=[EffiPrecision(**settings)], max_steps=1, **flags
    )
    trainer.fit(module, DataLoader(BatchList(batches(1)), batch_size=None))
    return trainer


class WithLBFGS(GPT):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(self.parameters())


class Shared(GPT):
    automatic_optimization = False

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD(self.parameters(), lr=0.1), torch.optim.SGD(self.blocks.parameters(), lr=0.1)]


class WithoutBlocks(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.layer(torch.ones(4)).sum()


@pytest.mark.parametrize(
    ("module", "settings", "message"),
    [
        (WithLBFGS, {}, "LBFGS computes gradients within its step"),
        (Shared, {}, "two optimizers hold the same parameter"),
        (lambda: GPT(blocks=2).half(), {}, "'positions' is in fp16|'embedding.weight' is in fp16"),
        (GPT, {"keep_fp32": ["*.layernorm"]}, r"keep_fp32: no module's name matches '\*\.layernorm'"),
        (WithoutBlocks, {"clamp_activations": 100.0}, "WithoutBlocks has none: leave it out"),
    ],
)
def test_modules_are_refused_before_training(module: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fit(module(), precision="16-mixed", **settings)


@pytest.mark.parametrize("plugins", ["plugins", "strategy"])
def test_flag_and_plugin_together_are_refused(plugins: str) -> None:
    plugin, flags = EffiPrecision("16-mixed"), {"accelerator": "cpu", "devices": 1, "precision": "bf16-mixed"}
    if plugins == "plugins":
        with pytest.raises(ValueError, match="Received both `precision=bf16-mixed` and `plugins="):
            pl.Trainer(strategy=EffiStrategy(), plugins=[plugin], **flags)
        return
    trainer = pl.Trainer(strategy=EffiStrategy(precision_plugin=plugin), logger=False, max_steps=1, **flags)
    with pytest.raises(ValueError, match="contradict each other"):
        trainer.fit(GPT(blocks=2), DataLoader(BatchList(batches(1)), batch_size=None))


def test_plugin_beside_a_strategy_that_has_one_is_refused() -> None:
    strategy = EffiStrategy(precision_plugin=EffiPrecision("bf16-mixed"))
    with pytest.raises(MisconfigurationException, match="choose one"):
        pl.Trainer(accelerator="cpu", devices=1, strategy=strategy, plugins=[EffiPrecision("16-mixed")])


def test_devices_without_float16_are_refused_and_slow_ones_get_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="needs 16-bit float, which mps does not have"):
        hardware.refuse_without_float16(torch.device("mps"), "16-mixed")
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict)
    with pytest.warns(UserWarning, match="no fast units for float16, so precision='16-mixed' may be slower") as caught:
        fit(GPT(blocks=2), precision="16-mixed")
    assert len([w for w in caught if "fast units" in str(w.message)]) == 1


def test_float16_as_a_flag_becomes_bfloat16_on_a_cpu_by_lightning() -> None:
    with pytest.warns(UserWarning, match="not supported on CPU"):
        trainer = pl.Trainer(accelerator="cpu", devices=1, strategy=EffiStrategy(), precision="16-mixed")
    assert trainer.strategy.precision.precision == "bf16-mixed"
