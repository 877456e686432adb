"""A full checkpoint is an ordinary Lightning checkpoint: it is read where this package does not exist."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from tests.cli.process import run_command
from tests.harness import full_parameters, run_distributed
from tests.lightning.classifier import Classifier, ClassifierData
from tests.lightning.sides import STAGES, barrier, classifier, trainer_for

READER = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "lightning_effi":
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Absent())

import torch
from tests.lightning.classifier import Classifier

for path in sys.argv[1:]:
    module = Classifier.load_from_checkpoint(path, map_location="cpu", strict=True, weights_only=True)
    torch.save({"state": module.state_dict(), "hparams": dict(module.hparams)}, path + ".read")
"""


def save_every_stage(folder: str) -> list[dict[str, torch.Tensor]]:
    trained = []
    for stage in STAGES:
        module = classifier(width=5)
        trainer = trainer_for({"zero_stage": stage}, max_epochs=1)
        trainer.fit(module, datamodule=ClassifierData())
        trainer.save_checkpoint(f"{folder}/{stage}.ckpt")
        trained.append(full_parameters(module))
    barrier()
    return trained


def test_full_checkpoints_load_strictly_where_the_package_cannot_be_imported(tmp_path: Path) -> None:
    trained, _ = run_distributed(save_every_stage, 2, str(tmp_path))
    paths = [str(tmp_path / f"{stage}.ckpt") for stage in STAGES]
    done = run_command([sys.executable, "-c", READER, *paths], tmp_path)
    assert done.returncode == 0, done.stderr
    shapes = {name: tensor.shape for name, tensor in Classifier(width=5).state_dict().items()}
    for path, expected in zip(paths, trained, strict=True):
        read = torch.load(path + ".read")
        assert {name: tensor.shape for name, tensor in read["state"].items()} == shapes
        assert read["hparams"]["width"] == 5
        assert all(torch.equal(read["state"][name], tensor) for name, tensor in expected.items())
