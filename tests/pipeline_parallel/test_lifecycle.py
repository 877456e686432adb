"""A pipeline in a whole run: validation, logging, checkpoints, resuming, stopping, predicting."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader

from tests.harness import make_trainer, run_distributed, run_isolated
from tests.models.gpt import GPT, batches

STAGES = {"pipeline_parallel_size": 2, "microbatches": 4}
SEVERAL_A_RANK = {**STAGES, "pipeline": "zbv"}  # the last stage on rank 0


class Classifier(GPT):
    """Metrics, dict outputs, and a monitored value."""

    def __init__(self, **settings: Any) -> None:
        from torchmetrics import MeanMetric, SumMetric
        from torchmetrics.classification import MulticlassAccuracy

        super().__init__(**settings)
        self.train_accuracy = MulticlassAccuracy(17, average="micro")
        self.val_accuracy = MulticlassAccuracy(17, average="micro")
        self.val_mean = MeanMetric()
        self.tokens = SumMetric()

    def training_step(self, batch: Tensor, batch_idx: int) -> dict[str, Any]:
        self.tokens(batch)  # before the model, where every stage comes by
        self.log("tokens", self.tokens, on_step=False, on_epoch=True)
        scores = self(batch[:, :-1])
        loss = F.cross_entropy(scores.flatten(0, 1), batch[:, 1:].flatten())
        self.train_accuracy(scores.flatten(0, 1), batch[:, 1:].flatten())
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        self.log("train_accuracy", self.train_accuracy, on_step=False, on_epoch=True)
        return {"loss": loss, "scores": scores}

    def validation_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        scores = self(batch[:, :-1])
        loss = F.cross_entropy(scores.flatten(0, 1), batch[:, 1:].flatten())
        self.val_accuracy(scores.flatten(0, 1), batch[:, 1:].flatten())
        self.val_mean.update(loss)
        self.log("val_loss", loss)
        self.log("val_accuracy", self.val_accuracy)
        return loss

    def on_validation_epoch_end(self) -> None:
        self.log("val_mean", self.val_mean.compute())
        self.val_mean.reset()

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        scores = self(batch[:, :-1])
        self.log("test_loss", F.cross_entropy(scores.flatten(0, 1), batch[:, 1:].flatten()))
        self.log("test_rows", float(len(batch)), reduce_fx="sum")

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(batch[:, :-1]).argmax(-1)


def loader(rows: int, size: int, seed: int, shuffle: bool = False) -> DataLoader[Any]:
    return DataLoader(batches(1, rows=rows, seed=seed)[0], batch_size=size, shuffle=shuffle)  # type: ignore[arg-type]


def fit(strategy: Any, world_size: int, directory: Path, epochs: int, resume: str | None = None) -> dict[str, Any]:
    pl.seed_everything(3, verbose=False)
    # fp64 from the start: stock Lightning loads a checkpoint before it converts the module
    module = Classifier(optimizer="adamw", learning_rate=1e-2).double()
    stopping = EarlyStopping("val_loss", patience=1)
    best = ModelCheckpoint(directory, monitor="val_loss", filename="best", save_last=True)
    trainer = make_trainer(
        strategy,
        world_size,
        callbacks=[stopping, best],
        max_epochs=epochs,
        num_sanity_val_steps=1,
        enable_checkpointing=True,
        default_root_dir=directory,
        log_every_n_steps=1,
        use_distributed_sampler=False,  # two pipelines see the same data, and their mean is that of one
        precision="64-true",  # in fp32, AdamW makes an update of the rounding noise in the gradient of a key bias
    )
    # a resumed run draws another order, in stock Lightning too
    trainer.fit(module, loader(13, 4, 1, shuffle=epochs > 2), loader(13, 4, 2), ckpt_path=resume)
    trainer.save_checkpoint(directory / "after.ckpt")
    return {
        "metrics": {key: float(value) for key, value in trainer.callback_metrics.items()},
        "parameters": {name: p.detach().clone() for name, p in module.named_parameters()},
        "step": trainer.global_step,
        "epoch": trainer.current_epoch,
        "best": float(best.best_model_score),
    }


def assert_same(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert ours["metrics"] == pytest.approx(theirs["metrics"], rel=1e-6)
    assert (ours["step"], ours["epoch"]) == (theirs["step"], theirs["epoch"])
    assert list(ours["parameters"]) == list(theirs["parameters"])
    for name, parameter in theirs["parameters"].items():
        torch.testing.assert_close(
            ours["parameters"][name], parameter, rtol=0, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_run_with_validation_and_checkpoints_equals_the_single_process(tmp_path: Path) -> None:
    reference = run_isolated(fit, None, 1, tmp_path / "plain", 3)
    for record in run_distributed(fit, 2, SEVERAL_A_RANK, 2, tmp_path / "stages", 3):
        assert_same(record, reference)
        assert record["best"] == pytest.approx(reference["best"], rel=1e-6)
    for name in ("last.ckpt", "after.ckpt"):
        assert_same_checkpoint(*(torch.load(tmp_path / run / name, weights_only=True) for run in ("stages", "plain")))


def assert_same_checkpoint(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert list(ours["state_dict"]) == list(theirs["state_dict"])
    assert ours["state_dict"]["head.weight"].data_ptr() == ours["state_dict"]["embedding.weight"].data_ptr()
    [our_state], [their_state] = ours["optimizer_states"], theirs["optimizer_states"]
    assert list(our_state["state"]) == list(their_state["state"])
    assert [group["params"] for group in our_state["param_groups"]] == [
        group["params"] for group in their_state["param_groups"]
    ]
    for position, entries in their_state["state"].items():
        for key, value in entries.items():
            torch.testing.assert_close(our_state["state"][position][key], value, rtol=0, atol=1e-9)


def test_checkpoints_go_both_ways_between_stages_and_a_single_process(tmp_path: Path) -> None:
    run_isolated(fit, None, 1, tmp_path / "plain", 1)
    run_distributed(fit, 2, STAGES, 2, tmp_path / "stages", 1)
    reference = run_isolated(fit, None, 1, tmp_path / "reference", 2, str(tmp_path / "plain" / "last.ckpt"))
    for start in ("plain", "stages"):
        checkpoint = str(tmp_path / start / "last.ckpt")
        assert_same(run_distributed(fit, 2, STAGES, 2, tmp_path / f"{start}-stages", 2, checkpoint)[1], reference)
    assert_same(run_isolated(fit, None, 1, tmp_path / "stages-plain", 2, checkpoint), reference)


SHARDED = {"checkpoints": "sharded"}
TWO_PIPELINES = {**STAGES, **SHARDED, "zero_stage": 2}


def test_directories_of_stages_load_in_any_layout(tmp_path: Path) -> None:
    run_distributed(fit, 2, STAGES | SHARDED, 2, tmp_path / "stages", 1)
    checkpoint = str(tmp_path / "stages" / "last.ckpt")
    reference = run_isolated(fit, None, 1, tmp_path / "reference", 2)
    assert_same(run_distributed(fit, 2, STAGES, 2, tmp_path / "again", 2, checkpoint)[0], reference)
    assert_same(run_distributed(fit, 1, {}, 1, tmp_path / "alone", 2, checkpoint)[0], reference)


def test_two_pipelines_go_on_from_their_shards(tmp_path: Path) -> None:
    reference = run_isolated(fit, None, 1, tmp_path / "reference", 2)
    run_distributed(fit, 4, TWO_PIPELINES, 4, tmp_path / "half", 1)
    checkpoint = str(tmp_path / "half" / "last.ckpt")
    for record in run_distributed(fit, 4, STAGES | {"zero_stage": 3}, 4, tmp_path / "more", 2, checkpoint):
        record["metrics"]["tokens"] /= 2  # a sum over both pipelines, which saw the same data
        assert_same(record, reference)


def predict(strategy: Any, world_size: int) -> tuple[Any, Any]:
    pl.seed_everything(3, verbose=False)
    module = Classifier()
    trainer = make_trainer(strategy, world_size, max_epochs=1, barebones=False, precision="64-true")
    short = DataLoader(batches(1, rows=13, seed=2)[0][:, :9], batch_size=4)  # type: ignore[arg-type]
    trainer.fit(module, loader(8, 4, 1), short)
    rows = trainer.predict(module, loader(13, 4, 2))
    found = [dict(trainer.callback_metrics), *trainer.validate(module, short, verbose=False)]
    return rows, found + trainer.test(module, loader(13, 4, 2), verbose=False)


def test_thirteen_samples_are_evaluated_and_predicted_once_and_in_order() -> None:
    rows, metrics = run_isolated(predict, None, 1)
    for ours, found in run_distributed(predict, 2, STAGES, 2):
        assert [len(batch) for batch in ours] == [4, 4, 4, 1]
        assert torch.equal(torch.cat(ours), torch.cat(rows))
        for here, there in zip(found, metrics, strict=True):
            assert {key: float(value) for key, value in here.items()} == pytest.approx(
                {key: float(value) for key, value in there.items()}, rel=1e-6
            )


def without_memory(strategy: Any, world_size: int) -> list[dict[str, float]]:
    """The whole module does not fit into one process when the run is over."""
    from lightning_effi.pipeline_parallel import engine

    engine.available_memory = lambda: 0.0
    pl.seed_everything(3, verbose=False)
    module = Classifier(optimizer="adamw")
    trainer = make_trainer(strategy, world_size, max_epochs=1, default_root_dir=Path.cwd(), precision="64-true")
    trainer.fit(module, loader(8, 4, 1))
    before = trainer.test(module, loader(13, 4, 2), verbose=False)
    trainer.save_checkpoint("after.ckpt")
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    after = trainer.test(module, loader(13, 4, 2), ckpt_path="after.ckpt", verbose=False)
    assert strategy is None or "blocks.0.norm1.weight" not in dict(module.named_parameters()) or module.global_rank == 0
    return [*before, *after]


@pytest.mark.parametrize("checkpoints", [pytest.param("full", marks=pytest.mark.full), "sharded"])
def test_module_that_stays_split_is_tested_saved_and_loaded(checkpoints: str) -> None:
    expected = run_isolated(without_memory, None, 1, fresh=True)
    for found in run_distributed(without_memory, 2, {**STAGES, "checkpoints": checkpoints}, 2, fresh=True):
        for ours, theirs in zip(found, expected, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-6)


def held_parameters(strategy: Any) -> tuple[dict[str, int], dict[str, Tensor]]:
    class Held(pl.Callback):
        def on_before_optimizer_step(self, trainer: pl.Trainer, module: pl.LightningModule, optimizer: Any) -> None:
            self.held = {name: p.numel() for name, p in module.named_parameters()}
            self.stepped = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
            self.plan = str(trainer.strategy.plan)
            self.planned = trainer.strategy.plan.bytes_per_rank["parameters"]
            self.timeline = str(trainer.strategy.plan.timeline)

        def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
            shared = module.get_parameter("embedding.weight")
            self.shared = {"value": shared.detach().clone(), **trainer.optimizers[0].state[shared]}

    held = Held()
    trainer = make_trainer(strategy, 2, callbacks=[held], max_steps=1)
    trainer.fit(Classifier(optimizer="adamw"), loader(8, 8, 1))
    assert held.stepped == sum(held.held.values()) == held.planned // 4
    assert "held by stages 0, 1: embedding.weight" in held.plan
    assert held.timeline.startswith("1f1b, 4 micro-batches, bubble 20%")
    return held.held, held.shared


def test_each_rank_holds_its_stage_and_nothing_else() -> None:
    (first, ours), (last, theirs) = run_distributed(held_parameters, 2, STAGES)
    assert {"embedding.weight", "positions", "blocks.1.norm1.weight"} <= set(first)
    assert not any(name.startswith(("blocks.2", "blocks.3", "norm")) for name in first)
    assert {"embedding.weight", "norm.weight", "blocks.3.norm1.weight"} <= set(last)
    assert not any(name.startswith(("blocks.0", "blocks.1")) for name in last)
    assert all(torch.equal(ours[key], theirs[key]) for key in ("value", "step", "exp_avg", "exp_avg_sq"))
