"""Places, plugins and hooks of checkpoints are Lightning's, and mean under EffiStrategy what they mean without it."""

from __future__ import annotations

import gzip
import io
import pickle
import threading
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import AsyncCheckpointIO, CheckpointIO, TorchCheckpointIO
from torch import Tensor

from tests.harness import full_tensor, run_distributed
from tests.lightning.classifier import Classifier, ClassifierData
from tests.lightning.sides import Strategy, assert_same, barrier, classifier, in_folder, trainer_for, weights


class GzipIO(CheckpointIO):
    """Another file format: what it wrote, only it can read."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        buffer = io.BytesIO()
        torch.save(checkpoint, buffer)
        with gzip.open(path, "wb") as file:
            file.write(buffer.getvalue())

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        with gzip.open(path) as file:
            return torch.load(io.BytesIO(file.read()), map_location=map_location, weights_only=False)

    def remove_checkpoint(self, path: Any) -> None:
        Path(path).unlink()


class SlowIO(TorchCheckpointIO):
    """Begins to write when training has ended."""

    may_write = threading.Event()

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        assert self.may_write.wait(20)
        super().save_checkpoint(*args, **kwargs)


class Rows(ClassifierData):
    """Each data-parallel rank's rows."""

    def setup(self, stage: str) -> None:
        assert self.trainer is not None
        strategy: Any = self.trainer.strategy
        self.rank = getattr(strategy, "data_parallel_rank", self.trainer.global_rank)
        self.ranks = getattr(strategy, "data_parallel_size", self.trainer.world_size)


class Saving(pl.Callback):
    """Saves in the middle, and notes the moments at the end."""

    def __init__(self, path: str | None) -> None:
        self.path = path
        self.start: dict[str, Tensor] = {}
        self.moments: dict[str, Tensor] = {}
        self.rates: list[float] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.start = self._moments(trainer, pl_module)
        self.rates = [group["lr"] for group in trainer.optimizers[0].param_groups]

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        if trainer.global_step == 2 and self.path is not None:
            trainer.save_checkpoint(self.path)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        SlowIO.may_write.set()
        self.moments = self._moments(trainer, pl_module)

    def _moments(self, trainer: pl.Trainer, module: pl.LightningModule) -> dict[str, Tensor]:
        state = trainer.optimizers[0].state
        return {
            f"{name}.{key}": full_tensor(value).clone()
            for name, parameter in module.named_parameters()
            for key, value in sorted(state.get(parameter, {}).items())
        }


def train(
    strategy: Strategy, steps: int, module: Classifier | None = None, *, save: str | None = None, load: Any = None,
    **flags: Any,
) -> dict[str, Any]:  # fmt: skip
    saving, module = Saving(save), module or classifier()
    trainer = trainer_for(strategy, max_steps=steps, limit_val_batches=0, callbacks=[saving], **flags)
    trainer.fit(module, datamodule=Rows(), ckpt_path=load)
    barrier()
    return {"weights": weights(module), "moments": saving.moments, "start": saving.start, "rates": saving.rates}


class Editing(Classifier):
    """Changes checkpoints in its hooks."""

    drops = keeps_no_moments = False
    new_rate: float | None = None
    forgets: str | None = None

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.drops:
            checkpoint["optimizer_states"], checkpoint["lr_schedulers"] = [], []
        if self.new_rate is not None:
            checkpoint["optimizer_states"][0]["param_groups"][0]["lr"] = self.new_rate
        if self.forgets is not None:
            self.strict_loading = False
            checkpoint["state_dict"] = {k: v for k, v in checkpoint["state_dict"].items() if self.forgets not in k}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.keeps_no_moments:
            for state in checkpoint["optimizer_states"]:
                state["state"] = {}


def editing(**settings: Any) -> Editing:
    pl.seed_everything(99, verbose=False)
    module = Editing()
    for name, value in settings.items():
        setattr(module, name, value)
    return module


def hooks(strategy: Strategy) -> dict[str, Any]:
    train(strategy, 3, save="whole.ckpt")
    train(strategy, 3, editing(keeps_no_moments=True), save="bare.ckpt")
    return {
        "dropped": train(strategy, 4, editing(drops=True), load="whole.ckpt"),
        "rate": train(strategy, 4, editing(new_rate=0.5), load="whole.ckpt"),
        "forgotten": train(strategy, 4, editing(forgets="head"), load="whole.ckpt"),
        "saved without": train(strategy, 4, classifier(99), load="bare.ckpt"),
    }


def hooks_of_both(layout: dict[str, Any]) -> list[dict[str, Any]]:
    return [in_folder(str(name), hooks, {**layout, "checkpoints": name}) for name in ("full", "sharded")]


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param({"zero_stage": 2}, marks=pytest.mark.full),
        {"zero_stage": 3},
        {"pipeline_parallel_size": 2, "microbatches": 2},
    ],
    ids=["zero2", "zero3", "pp2"],
)
def test_what_hooks_change_in_checkpoints_is_respected(layout: dict[str, Any]) -> None:
    ranks = run_distributed(hooks_of_both, 2, layout, timeout=120.0)
    for runs in ranks:
        for found in runs:
            assert not found["dropped"]["start"]
            assert not found["saved without"]["start"]
            assert found["rate"]["start"]
            assert found["rate"]["rates"] == [0.5]
            assert found["dropped"]["rates"] == [0.05]
        assert_same(runs[0], runs[1], "sharded beside full")


@pytest.mark.full
def test_what_hooks_change_is_what_it_is_in_stock_lightning() -> None:
    stock = run_distributed(in_folder, 2, "stock", hooks, "ddp", timeout=120.0)
    ours = run_distributed(in_folder, 2, "ours", hooks, {"zero_stage": 2}, timeout=120.0)
    assert_same(stock[0], ours[0], "zero 2")


def plugins_and_places(strategy: Strategy) -> dict[str, Any]:
    settings = dict(strategy) if isinstance(strategy, dict) else strategy
    for name, plugin in (("gzip", GzipIO), ("async", AsyncCheckpointIO), ("slow", lambda: AsyncCheckpointIO(SlowIO()))):
        train(settings, 3, save=f"{name}.ckpt", plugins=[plugin()])
    url = Path("url.ckpt").absolute().as_uri()
    train(settings, 3, save=url)
    assert Path("url.ckpt").is_file()
    return {
        name: train(settings, 4, classifier(99), load=path, plugins=plugins)
        for name, path, plugins in (
            ("gzip", "gzip.ckpt", [GzipIO()]),
            ("async", "async.ckpt", []),
            ("written late", "slow.ckpt", [AsyncCheckpointIO()]),
            ("a URL", url, []),
        )
    }


@pytest.mark.parametrize(
    "layout",
    [
        {"zero_stage": 3},
        pytest.param({"zero_stage": 0}, marks=pytest.mark.full),
        pytest.param({"pipeline_parallel_size": 2, "microbatches": 2}, marks=pytest.mark.full),
    ],
    ids=["zero3", "zero0", "pp2"],
)
def test_plugins_and_urls_resume_where_a_path_does(layout: dict[str, Any]) -> None:
    for found in run_distributed(plugins_and_places, 2, layout, timeout=120.0):
        for name, run in found.items():
            assert_same(found["a URL"], run, name)
            assert run["start"], name


def from_memory() -> dict[str, Any]:
    """A file system that is not this machine's: stands for s3:// and gs://."""
    strategy = {"zero_stage": 2}
    train(strategy, 3, save="memory://a.ckpt")
    found = train(strategy, 4, classifier(99), load="memory://a.ckpt")
    errors = []
    for act in (
        lambda: train({"checkpoints": "sharded"}, 3, save="memory://b.ckpt"),
        lambda: train({"checkpoints": "sharded"}, 3, enable_checkpointing=True, default_root_dir="memory://runs"),
    ):
        with pytest.raises(ValueError, match="every rank has mounted") as error:
            act()
        errors.append(str(error.value))
    return {"resumed": found, "errors": errors}


def test_remote_places_hold_full_checkpoints_and_refuse_sharded_ones() -> None:
    [found] = run_distributed(from_memory, 1)
    assert found["resumed"]["start"]
    assert "memory://b.ckpt" in found["errors"][0]
    assert "memory://runs" in found["errors"][1]


class Marks:
    def __reduce__(self) -> Any:
        return Path.mkdir, (Path("marker"),)


def one_bad_shard() -> tuple[str, bool, bool]:
    """A shard that only the second rank reads is not what it should be."""
    strategy = {"zero_stage": 3, "checkpoints": "sharded"}
    train(strategy, 3, save="good.ckpt")
    module = classifier(99)
    if torch.distributed.get_rank() == 0:
        buffer = io.BytesIO()
        torch.save(Marks(), buffer)
        metadata = pickle.loads(Path("good.ckpt/.metadata").read_bytes())
        location = next(
            place for index, place in metadata.storage_data.items()
            if index.fqn == "model.head.weight" and "__1_" in place.relative_path
        )  # fmt: skip
        shards = Path("good.ckpt") / location.relative_path
        location.offset, location.length = shards.stat().st_size, len(buffer.getvalue())
        with shards.open("ab") as file:
            file.write(buffer.getvalue())
        Path("good.ckpt/.metadata").write_bytes(pickle.dumps(metadata))
    barrier()
    with pytest.raises(ValueError) as error:
        trainer_for(strategy, max_steps=4, limit_val_batches=0).fit(module, datamodule=Rows(), ckpt_path="good.ckpt")
    barrier()
    untouched = all(map(torch.equal, classifier(99).parameters(), module.parameters()))
    return str(error.value), untouched, Path("marker").exists()


def test_a_bad_shard_is_an_error_on_all_ranks_and_runs_nothing() -> None:
    for message, untouched, marked in run_distributed(one_bad_shard, 2):
        assert "good.ckpt/__1_0.distcp" in message
        assert "model.head.weight" in message
        assert untouched
        assert not marked


def folders(strategy: Strategy) -> str:
    saving = ModelCheckpoint("saved", filename="last")
    trainer_for(strategy, max_steps=2, limit_val_batches=0, callbacks=[saving], enable_checkpointing=True).fit(
        classifier(), datamodule=Rows()
    )
    Path("saved/last.ckpt/trainer.pt").unlink()
    with pytest.raises(ValueError) as error:
        train(strategy, 3, load="saved/last.ckpt")
    return str(error.value)


def test_a_directory_that_is_no_checkpoint_is_named() -> None:
    assert "saved/last.ckpt' is a directory" in run_distributed(folders, 1, {"checkpoints": "sharded"})[0]
