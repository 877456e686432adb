"""What hooks keep beside the parameters: on a stage, in checkpoints and after the run, it is that of one process."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader

from tests.harness import BatchList, WorkerError, make_trainer, run_distributed, run_isolated
from tests.models.gpt import GPT, batches

STAGES = {"pipeline_parallel_size": 2, "microbatches": 2}


class Shadow(nn.Module):
    """Averages as buffers, paired by name."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        for name, parameter in model.named_parameters():
            self.register_buffer(name.replace(".", "_"), parameter.detach().clone())
        self.register_buffer("updates", torch.tensor(0))

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        self.updates += 1
        shadow = dict(self.named_buffers())
        for name, parameter in model.named_parameters():
            shadow[name.replace(".", "_")].sub_(0.5 * (shadow[name.replace(".", "_")] - parameter))


class Averages(GPT):
    """The same averages kept in every way that people keep them."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.shadow = Shadow(self.blocks)
        self.by_place = [p.detach().clone() for p in self.blocks.parameters()]
        self.by_name = {name: p.detach().clone() for name, p in self.blocks.named_parameters()}
        self.twin = nn.Sequential(copy.deepcopy(self.blocks)).requires_grad_(False)
        self.hidden = [AveragedModel(self.blocks, multi_avg_fn=get_ema_multi_avg_fn(0.5)).double()]

    @torch.no_grad()
    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.shadow.update(self.blocks)
        for average, parameter in zip(self.by_place, self.blocks.parameters(), strict=True):
            step = average - parameter
            step.mul_(0.5)
            average.sub_(step)
        for name, parameter in self.blocks.named_parameters():
            self.by_name[name] = 0.5 * self.by_name[name] + 0.5 * parameter
        for average, parameter in zip(self.twin.parameters(), self.blocks.parameters(), strict=True):
            average.data.mul_(0.5).add_(parameter.data, alpha=0.5)
        self.hidden[0].update_parameters(self.blocks)

    def on_validation_start(self) -> None:
        self.kept = [p.detach().clone() for p in self.blocks.parameters()]
        self.use(self.by_place)

    def on_validation_end(self) -> None:
        self.use(self.kept)

    def use(self, values: list[Tensor]) -> None:
        for value, parameter in zip(values, self.blocks.parameters(), strict=True):
            parameter.data.copy_(value)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["averages"] = {
            "place": self.by_place,
            "name": self.by_name,
            "swa": list(self.hidden[0].parameters()),
        }
        checkpoint["parameters"] = [p.detach() for p in self.parameters()]

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.by_place, self.by_name = checkpoint["averages"]["place"], checkpoint["averages"]["name"]


def fit(strategy: Any, world_size: int, epochs: int, checkpoint: Path, resume: Path | None = None) -> dict[str, Any]:
    class Save(pl.Callback):
        def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            trainer.save_checkpoint(checkpoint)

    pl.seed_everything(3, verbose=False)
    module = Averages()
    data = [DataLoader(BatchList(batches(count, rows=4)), batch_size=None) for count in (2, 1)]
    trainer = make_trainer(strategy, world_size, max_epochs=epochs, callbacks=[Save()], precision="64-true")
    trainer.fit(module, *data, ckpt_path=resume)
    return {"state": module.state_dict(), "val_loss": float(trainer.callback_metrics["val_loss"])}


def assert_close(ours: Any, theirs: Any, where: str = "") -> None:
    if isinstance(theirs, Tensor):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12, msg=lambda text: f"{where}: {text}")
    elif isinstance(theirs, dict):
        assert list(ours) == list(theirs), where
        for key, value in theirs.items():
            assert_close(ours[key], value, f"{where}[{key}]")
    elif isinstance(theirs, list):
        assert len(ours) == len(theirs), where
        for place, value in enumerate(theirs):
            assert_close(ours[place], value, f"{where}[{place}]")


def test_averages_are_those_of_one_process_and_go_on_from_a_checkpoint(tmp_path: Path) -> None:
    first, second = tmp_path / "first.ckpt", tmp_path / "second.ckpt"
    expected = [run_isolated(fit, None, 1, 1, first), run_isolated(fit, None, 1, 2, second, first)]
    mine = tmp_path / "mine.ckpt", tmp_path / "resumed.ckpt"
    for rank in run_distributed(fit, 2, STAGES, 2, 1, mine[0]):
        assert rank["val_loss"] == pytest.approx(expected[0]["val_loss"], rel=1e-9)
        assert_close(rank["state"], expected[0]["state"])
    for rank in run_distributed(fit, 2, {**STAGES, "pipeline": "zbv"}, 2, 2, mine[1], mine[0]):
        assert rank["val_loss"] == pytest.approx(expected[1]["val_loss"], rel=1e-9)
        assert_close(rank["state"], expected[1]["state"])
    for ours, theirs in zip(mine, (first, second), strict=True):
        loaded, wanted = (torch.load(path, weights_only=True) for path in (ours, theirs))
        for key in ("state_dict", "averages", "parameters"):
            assert_close(loaded[key], wanted[key], key)


@pytest.mark.full
def test_averages_in_a_directory(tmp_path: Path) -> None:
    first, second = tmp_path / "first.ckpt", tmp_path / "second.ckpt"
    run_isolated(fit, None, 1, 1, first)
    expected = run_isolated(fit, None, 1, 2, second, first)
    sharded = {**STAGES, "checkpoints": "sharded", "zero_stage": 3}
    run_distributed(fit, 2, sharded, 2, 1, tmp_path / "directory")
    for rank in run_distributed(fit, 2, sharded, 2, 2, tmp_path / "more", tmp_path / "directory"):
        assert_close(rank["state"], expected["state"])


class ReadsNorms(GPT):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.norm = float(torch.stack([p.detach().norm() for p in self.parameters()]).norm())


class AddsUp(GPT):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        total = torch.zeros(())
        for parameter in self.parameters():
            total += parameter.detach().square().sum()


class NormAsBuffer(GPT):
    """Of the stage's own parameters, which ``named_parameters`` gives."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.register_buffer("norm_of_weights", torch.zeros(()))

    def on_train_batch_end(self, *_: Any) -> None:
        self.norm_of_weights.fill_(sum(float(p.detach().square().sum()) for _, p in self.named_parameters()))
        self.trainer.save_checkpoint("norm.ckpt")


def train(module: Any) -> None:
    trainer = make_trainer(STAGES, 2, max_steps=1)
    trainer.fit(module(), DataLoader(BatchList(batches(1, rows=4)), batch_size=None))


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (
            ReadsNorms,
            r"__float__ needs the value of '.*' and \d+ more \(.*test_hook_state.py:\d+: self.norm = ",
        ),
        (AddsUp, r"what is computed from it needs the value of '.*' \(.*total \+= "),
        (NormAsBuffer, r"hooks have given 'norm_of_weights' other values on stage 0 than on stage 1"),
    ],
)
def test_what_needs_all_parameters_is_refused_by_name(module: Any, message: str) -> None:
    with pytest.raises(WorkerError, match=message):
        run_distributed(train, 2, module)


class CountsPlaces(GPT):
    """Hooks see every parameter in its place; names, gradients and counts of elements are as in one process."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        listed = list(self.parameters())
        self.numel = sum(p.numel() for p in listed if isinstance(p, nn.Parameter) and p.requires_grad)
        self.first = next(p.shape for p in self.blocks[3].parameters())
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.1)
        self.places = [name for name, _ in self.named_parameters()]


def count_places(strategy: Any, world_size: int) -> dict[str, Any]:
    pl.seed_everything(3, verbose=False)
    module = CountsPlaces()
    make_trainer(strategy, world_size, max_steps=2, precision="64-true").fit(
        module, DataLoader(BatchList(batches(2, rows=4)), batch_size=None)
    )
    assert "parameters" not in vars(module)
    return {"numel": module.numel, "first": module.first, "state": module.state_dict(), "places": module.places}


def test_parameters_are_listed_in_their_places() -> None:
    expected = run_isolated(count_places, None, 1)
    found = run_distributed(count_places, 2, STAGES, 2)
    for rank in found:
        assert (rank["numel"], rank["first"]) == (expected["numel"], expected["first"])
        assert_close(rank["state"], expected["state"])
        assert set(rank["places"]) < set(expected["places"]), "names are those of the stage"
    assert set().union(*(rank["places"] for rank in found)) == set(expected["places"])
