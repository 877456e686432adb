"""The state of the loss scale goes with checkpoints, from and to stock Lightning too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch.utils.data import DataLoader

from lightning_effi import EffiPrecision, EffiStrategy
from tests.harness import BatchList
from tests.models.gpt import GPT, batches


def trainer(precision: str = "16-mixed", steps: int = 3, stock: bool = False, **settings: Any) -> pl.Trainer:
    flags: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    if stock:  # the flag becomes bf16 on a CPU; this is what it makes on a GPU
        scaler = torch.amp.GradScaler("cpu", **settings)
        plugin: Any = MixedPrecision("16-mixed", "cpu", scaler)
    else:
        plugin = EffiPrecision(precision, **settings)  # type: ignore[arg-type]
        flags["strategy"] = EffiStrategy()
    return pl.Trainer(accelerator="cpu", devices=1, plugins=[plugin], max_steps=steps, max_epochs=-1, **flags)


def fit(trainer: pl.Trainer, load: Path | None = None) -> GPT:
    pl.seed_everything(7, verbose=False)
    module = GPT(blocks=2)
    trainer.fit(module, DataLoader(BatchList(batches(20)), batch_size=None), ckpt_path=load)
    return module


def test_scale_of_stock_lightning_goes_on_here(tmp_path: Path) -> None:
    before = trainer(stock=True, init_scale=512.0, growth_interval=4)
    fit(before)
    before.save_checkpoint(tmp_path / "stock.ckpt")
    after = trainer(steps=4, growth_interval=4)
    fit(after, tmp_path / "stock.ckpt")
    assert after.strategy.precision.loss_scale == 1024.0, "a fourth step without overflow"


def test_scale_goes_on_in_stock_lightning(tmp_path: Path) -> None:
    before = trainer(init_scale=512.0, growth_interval=4)
    fit(before)
    before.save_checkpoint(tmp_path / "ours.ckpt")
    after = trainer(stock=True, steps=4)
    fit(after, tmp_path / "ours.ckpt")
    assert after.precision_plugin.scaler.get_scale() == 1024.0


def test_other_precisions_load_it_too(tmp_path: Path) -> None:
    before = trainer(init_scale=512.0)
    fit(before)
    before.save_checkpoint(tmp_path / "ours.ckpt")
    after = trainer("bf16-mixed", steps=4)
    fit(after, tmp_path / "ours.ckpt")
    after.save_checkpoint(tmp_path / "bf16.ckpt")
    again = trainer(steps=5, init_scale=64.0)
    fit(again, tmp_path / "bf16.ckpt")
    assert again.strategy.precision.loss_scale == 64.0


def test_one_process_equals_stock_lightning() -> None:
    ours, theirs = fit(trainer(init_scale=1024.0)), fit(trainer(stock=True, init_scale=1024.0))
    for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(mine, other), name


def test_scaler_given_to_the_stock_plugin_is_used() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**26, growth_factor=4.0, backoff_factor=0.25, growth_interval=7)
    plugin = EffiPrecision.from_stock(MixedPrecision("16-mixed", "cpu", scaler))
    settings = plugin.scaler.settings
    assert (settings.init_scale, settings.growth_factor, settings.backoff_factor) == (2.0**26, 4.0, 0.25)
    assert settings.growth_interval == 7
