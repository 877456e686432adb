"""Whole objects in ``save_hyperparameters()`` go into checkpoints as stock strategies put them there."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torchmetrics
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_effi import EffiPrecision, EffiStrategy, HealthCheck
from tests.harness import run_distributed
from tests.lightning.sides import barrier, in_folder, trainer_for

WIDTH = 16
LAYOUTS: dict[str, dict[str, Any]] = {
    "zero 1": {"zero_stage": 1},
    "zero 3": {"zero_stage": 3},
    "tp 2": {"tensor_parallel_size": 2},
    "pp 2": {"pipeline_parallel_size": 2, "microbatches": 2},
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Given(pl.LightningModule):
    """Gets everything that it works with as arguments."""

    def __init__(self, net: nn.Module, parts: dict[str, nn.Module], metric: nn.Module, **arguments: Any) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net, self.head, self.metric = net, parts["head"], metric
        self.arguments = arguments

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.net(x))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self(batch).pow(2).mean()
        self.metric(loss.detach())
        self.log("metric", self.metric)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)

    def on_train_end(self) -> None:
        self.metric.clone()
        self.trainer.save_checkpoint("end.ckpt")


def given(**arguments: Any) -> Given:
    pl.seed_everything(3, verbose=False)
    net = nn.Sequential(*[Block() for _ in range(4)])
    return Given(net, {"head": nn.Linear(WIDTH, 2)}, torchmetrics.MeanMetric(), **arguments)


def saved_by(layout: dict[str, Any]) -> dict[str, Any]:
    strategy: dict[str, Any] = {**layout, "verify": False}
    copies = {"strategy": EffiStrategy(**strategy), "plugins": [EffiPrecision()], "callbacks": [HealthCheck()]}
    module = given(**copies)
    trainer = trainer_for(strategy, max_steps=2, precision="32-true")
    module.arguments["running"] = module.hparams["running"] = trainer.strategy
    module.arguments["precision"] = module.hparams["precision"] = trainer.strategy.precision_plugin
    trainer.fit(module, DataLoader(torch.randn(32, WIDTH), batch_size=4))
    barrier()
    assert module.hparams["net"] is module.net, "what runs is left alone"
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


def save_in_all() -> dict[str, Any]:
    return {
        f"{name}, {kind}": in_folder(f"{name}, {kind}", saved_by, {**layout, "checkpoints": kind})
        for name, layout in LAYOUTS.items()
        for kind in ("full", "sharded")
        if kind == "full" or name == "zero 3"
    } | {"folder": str(Path.cwd())}


@pytest.fixture(scope="module")
def saved() -> dict[str, Any]:
    return run_distributed(read_all, 2, timeout=150.0)[0]


def read_all() -> dict[str, Any]:
    ends = save_in_all()
    folder, found = Path(ends.pop("folder")), {}
    for name, end in ends.items():
        path = folder / name / "end.ckpt"
        file = path / "trainer.pt" if path.is_dir() else path
        arguments = torch.load(file, weights_only=False)["hyper_parameters"]
        found[name] = {
            "end": end,
            "types": {key: type(value) for key, value in arguments.items()},
            "blocks": {type(block) for block in arguments["net"]},
            "weights": {
                **{f"net.{key}": value for key, value in arguments["net"].state_dict().items()},
                **{f"head.{key}": value for key, value in arguments["parts"]["head"].state_dict().items()},
            },
            "is computed with": None if path.is_dir() else arguments["net"](torch.ones(1, WIDTH)).detach(),
            "metric": arguments["metric"],
            "settings": [arguments[key].config for key in ("strategy", "running")],
            "loaded": None if path.is_dir() else loaded(path),
        }
    return found


def loaded(path: Path) -> dict[str, Tensor]:
    module = Given.load_from_checkpoint(path, weights_only=False)
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


FULL = [f"{name}, full" for name in LAYOUTS]


@pytest.mark.parametrize("name", FULL)
def test_modules_are_saved_whole_with_trained_values(saved: dict[str, Any], name: str) -> None:
    found = saved[name]
    assert found["types"]["net"] is nn.Sequential
    assert found["blocks"] == {Block}
    assert found["weights"].keys() == found["end"].keys()
    initial = dict(given().named_parameters())
    for key, value in found["end"].items():
        assert torch.equal(found["weights"][key], value), key
        assert torch.equal(found["loaded"][key], value), key
        assert not torch.equal(initial[key], value), key
    assert torch.isfinite(found["is computed with"]).all()


@pytest.mark.parametrize("name", [*FULL, "zero 3, sharded"])
def test_strategies_plugins_callbacks_and_metrics_belong_to_no_run(saved: dict[str, Any], name: str) -> None:
    found = saved[name]
    assert found["types"]["running"] is EffiStrategy
    assert found["types"]["precision"] is EffiPrecision
    assert found["settings"][0] == found["settings"][1], "a strategy that runs is saved as its settings"
    assert found["metric"].dist_sync_fn is None
    assert copy.deepcopy(found["metric"]).process_group is None


def test_directories_have_the_structure_and_their_values_elsewhere(saved: dict[str, Any]) -> None:
    found = saved["zero 3, sharded"]
    assert found["blocks"] == {Block}
    assert all(value.is_meta for value in found["weights"].values())


class Unpicklable(Given):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.net.function = lambda x: x

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["mine"] = {"net": self.net}

    def on_train_end(self) -> None:
        with pytest.raises(ValueError, match=r"holds the module 'net' as a whole: Can't (pickle|get local)"):
            self.trainer.save_checkpoint("end.ckpt")


def fit_unpicklable() -> None:
    module = Unpicklable(nn.Sequential(Block(), Block()), {"head": nn.Linear(WIDTH, 2)}, torchmetrics.MeanMetric())
    trainer_for({"zero_stage": 2}, max_steps=1).fit(module, DataLoader(torch.randn(8, WIDTH), batch_size=4))


def test_a_module_that_cannot_be_pickled_is_named() -> None:
    run_distributed(fit_unpicklable, 1)
