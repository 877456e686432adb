"""Runs in which a parameter is registered under another name: pruning, parametrizations, their checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, ModelPruning
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune
from typing_extensions import override

from tests.harness import run_distributed
from tests.lightning.classifier import Classifier, ClassifierData
from tests.lightning.sides import Strategy, assert_same_as_single_process, barrier, in_folder, trainer_for, weights

Callbacks = Callable[[Classifier], list[Callback]]


def each_weight_by_itself(module: Classifier) -> list[Callback]:
    linears: Any = [(block.linear, "weight") for block in module.blocks]
    return [ModelPruning("l1_unstructured", parameters_to_prune=linears, amount=0.3, use_global_unstructured=False,
        use_lottery_ticket_hypothesis=False)]  # fmt: skip


def all_weights_together(module: Classifier) -> list[Callback]:
    return [
        ModelPruning("l1_unstructured", amount=0.2, use_lottery_ticket_hypothesis=False, make_pruning_permanent=False)
    ]


def rows_from_the_start(module: Classifier) -> list[Callback]:
    class Prune(Callback):
        @override
        def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            prune.ln_structured(module.stem, "weight", amount=2, n=2, dim=0)

        @override
        def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            if trainer.current_epoch == 1:
                prune.ln_structured(module.head, "weight", amount=1, n=1, dim=1)
                prune.remove(module.stem, "weight")

    return [Prune()]


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def parametrized(module: Classifier) -> list[Callback]:
    class Parametrize(Callback):
        @override
        def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            if trainer.current_epoch == 1:
                parametrize.register_parametrization(module.blocks[0].linear, "weight", Doubled())
                parametrize.register_parametrization(module.head, "weight", Doubled())

    return [Parametrize()]


def lottery_tickets(module: Classifier) -> list[Callback]:
    """Back to the first values once; on the CPU Lightning's own copies of them are trained along from then on."""
    return [ModelPruning("l1_unstructured", amount=0.2, use_lottery_ticket_hypothesis=lambda epoch: epoch == 0)]


KINDS: dict[str, Callbacks] = {
    "each": each_weight_by_itself,
    "all": all_weights_together,
    "rows": rows_from_the_start,
    "parametrized": parametrized,
    "tickets": lottery_tickets,
}


class Penalised(Classifier):
    """Holds its weights in a list of its own as well, and adds their squares to the loss.

    With SGD, since AdamW would make updates of the rounding in gradients that pruned weights leave at zero.
    """

    def __init__(self) -> None:
        super().__init__()
        self.penalised = [module.weight for module in self.modules() if isinstance(module, nn.Linear)]

    @override
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + 0.01 * sum(w.square().sum() for w in self.penalised)


def fit_each(strategy: Strategy, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: in_folder(name, _fit, strategy, KINDS[name]) for name in names}


def _fit(strategy: Strategy, callbacks: Callbacks) -> dict[str, Any]:
    pl.seed_everything(5, verbose=False)
    module = Penalised()
    every = ModelCheckpoint("every", filename="{step}", every_n_epochs=1, save_top_k=-1)
    trainer = trainer_for(strategy, max_epochs=3, callbacks=[*callbacks(module), every], enable_checkpointing=True)
    trainer.fit(module, datamodule=ClassifierData())
    barrier()
    files = {path.name: torch.load(path, weights_only=False) for path in sorted(Path("every").iterdir())}
    return {
        "weights": dict(sorted(weights(module).items())),
        "names": [name for name, _ in module.named_parameters()],
        "attribute": module.head.weight.detach().clone(),
        "checkpoints": {
            name: {
                "state": dict(sorted(file["state_dict"].items())),
                "moments": [entry["momentum_buffer"] for entry in file["optimizer_states"][0]["state"].values()],
            }
            for name, file in files.items()
        },
    }


@pytest.mark.parametrize(
    ("zero_stage", "names"),
    [
        pytest.param(0, ("parametrized",), id="0"),
        pytest.param(2, ("parametrized",), id="2"),
        pytest.param(3, tuple(KINDS), id="3"),
        pytest.param(0, tuple(KINDS), marks=pytest.mark.full, id="0-all"),
        pytest.param(2, tuple(KINDS), marks=pytest.mark.full, id="2-all"),
        pytest.param(1, tuple(KINDS), marks=pytest.mark.full, id="1"),
    ],
)
def test_training_goes_on_as_in_one_process(zero_stage: int, names: tuple[str, ...]) -> None:
    observed = assert_same_as_single_process(fit_each, zero_stage, names, limit=120.0)
    assert all(len(observed[0][name]["checkpoints"]) == 3 for name in names)


def fit_in_parts(settings: dict[str, Any]) -> str:
    module = Penalised()
    trainer = trainer_for(settings, max_epochs=1, callbacks=all_weights_together(module))
    with pytest.raises(ValueError, match="ModelPruning") as refused:
        trainer.fit(module, datamodule=ClassifierData())
    assert trainer.global_step == 0
    return str(refused.value)


@pytest.mark.parametrize("axis", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_pruning_of_split_modules_is_refused_before_training(axis: str) -> None:
    assert f"{axis}=2 leaves a part" in run_distributed(fit_in_parts, 2, {axis: 2})[0]
