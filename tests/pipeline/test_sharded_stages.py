"""Stages whose parameters, gradients and optimizer states are sharded over the pipelines of a run."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest

from lightning_effi import EffiPrecision, _compat
from tests.harness import ADAMW_FP64, Training, run, run_reference, train_and_assert_parity
from tests.pipeline.test_parity import pipelined

STAGES = pytest.mark.parametrize("zero_stage", [1, 2, 3], ids=lambda stage: f"zero{stage}")


def sharded(model: str, zero_stage: int, **settings: Any) -> Training:
    """Two pipelines of two stages."""
    strategy = {"zero_stage": zero_stage, "microbatches": 3, **settings.pop("strategy", {})}
    return pipelined(model, 2, rows=4, replicas=2, strategy=strategy, **settings)


@STAGES
@pytest.mark.parametrize("model", ["gpt-tied", "llama"])
def test_gradients_and_clipping_equal_single_process(model: str, zero_stage: int) -> None:
    train_and_assert_parity(sharded(model, zero_stage, clip=0.1))


@pytest.mark.full
@STAGES
@pytest.mark.parametrize("model", ["encoder", "gpt2", "bert", "vit-timm", "lora-gpt", "lora-peft-llama"])
def test_gradients_of_further_models(model: str, zero_stage: int) -> None:
    train_and_assert_parity(sharded(model, zero_stage, clip=0.1))


@STAGES
def test_adamw_over_accumulation_windows(zero_stage: int) -> None:
    train_and_assert_parity(
        sharded("gpt-tied", zero_stage, optimizer="adamw", precision="64-true", accumulate=2, clip=0.1), ADAMW_FP64
    )


@pytest.mark.parametrize("gradient_sync", ["every", "last"])
def test_reducing_after_each_micro_batch_or_once(gradient_sync: str) -> None:
    train_and_assert_parity(sharded("gpt-tied", 2, accumulate=2, strategy={"gradient_sync": gradient_sync}))


def test_clipping_by_value_and_hybrid_sharding() -> None:
    training = sharded("gpt-tied", 3, clip=0.005, clip_algorithm="value", strategy={"replicate_size": 2})
    train_and_assert_parity(training)


@pytest.mark.parametrize(
    "precision",
    ["bf16-mixed", EffiPrecision("bf16-true", master_weights=True), EffiPrecision("bf16-mixed", keep_fp32=("head",))],
    ids=["mixed", "master", "kept"],
)
def test_low_precision_is_near_the_single_process(precision: Any) -> None:
    settings: dict[str, Any] = {"learning_rate": 0.05, "record_tensors": False, "steps": 4}
    if isinstance(precision, EffiPrecision):
        training = sharded("llama", 2, strategy={"precision_plugin": precision}, **settings)
    else:
        training = sharded("llama", 2, precision=precision, **settings)
    reference = run_reference(sharded("llama", 2, precision="bf16-mixed", **settings))
    assert run(training).losses == pytest.approx(reference.losses, rel=0.02)


def test_master_weights_in_one_pipeline() -> None:
    precision = EffiPrecision("bf16-true", master_weights=True)
    settings: dict[str, Any] = {"learning_rate": 0.05, "record_tensors": False, "steps": 4}
    training = pipelined("gpt-tied", strategy={"precision_plugin": precision}, **settings)
    reference = run_reference(pipelined("gpt-tied", precision="bf16-mixed", **settings))
    assert run(training).losses == pytest.approx(reference.losses, rel=0.02)


class HeldBytes(pl.Callback):
    """Bytes of parameters, gradients and moments between backward and update, after the first step."""

    def on_before_optimizer_step(self, trainer: pl.Trainer, module: pl.LightningModule, optimizer: Any) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        states = [v for entries in optimizer.state.values() for v in entries.values() if getattr(v, "ndim", 0)]
        self.observation = {
            "parameters": _bytes(module.parameters()),
            "gradients": _bytes(p.grad for p in parameters if p.grad is not None),
            "optimizer states": _bytes(states),
            "planned": trainer.strategy.plan.bytes_per_rank,
        }


def _bytes(tensors: Any) -> int:
    return sum(local.numel() * local.element_size() for local in map(_compat.local_tensor, tensors))


@STAGES
def test_each_rank_holds_its_shard_of_its_stage(zero_stage: int) -> None:
    record = run(
        sharded("gpt-tied", zero_stage, optimizer="adamw", steps=2, callbacks=(HeldBytes,), record_tensors=False)
    )
    whole = 4 * sum(p.numel() for p in pipelined("gpt-tied").module_factory().parameters())
    for [held] in record.observations:
        assert held["parameters"] == held["gradients"]
        assert held["optimizer states"] == 2 * held["parameters"]
        last_row = held["planned"]["parameters"] - held["parameters"]  # 17 words, of which a rank has 9 or 8
        assert last_row in (0, 4 * 16)
        assert held["planned"]["optimizer states"] == 2 * held["planned"]["parameters"]
        assert held["parameters"] < 0.27 * whole  # a quarter, and the copies of shared parameters
