"""Stages whose parameters, gradients and optimizer states are sharded over the pipelines of a run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import pytest
from torch import Tensor, nn
from torch.utils.data import DistributedSampler

from lightning_effi import EffiPrecision
from lightning_effi.compat import dtensor as dtensor_compat
from tests.harness import ADAMW_FP64, BatchList, Training, assert_parity, run, run_reference, train_and_assert_parity
from tests.models.gpt import GPT, batches
from tests.pipeline_parallel.test_parity import pipelined

STAGES = pytest.mark.parametrize("zero_stage", [1, 2, 3], ids=lambda stage: f"zero{stage}")


def sharded(model: str, zero_stage: int, **settings: Any) -> Training:
    """Two pipelines of two stages."""
    strategy = {"zero_stage": zero_stage, "microbatches": 3, **settings.pop("strategy", {})}
    return pipelined(model, 2, rows=4, replicas=2, strategy=strategy, **settings)


class HeldBytes(pl.Callback):
    """Bytes of parameters, gradients and moments between backward and the last update."""

    def on_before_optimizer_step(self, trainer: pl.Trainer, module: pl.LightningModule, optimizer: Any) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        states = [v for entries in optimizer.state.values() for v in entries.values() if getattr(v, "ndim", 0)]
        self.observation = {
            # by name those of the stage; ``parameters()`` lists stand-ins of other stages' as well
            "parameters": _bytes(p for _, p in module.named_parameters()),
            "gradients": _bytes(p.grad for p in parameters if p.grad is not None),
            "optimizer states": _bytes(states),
            "planned": trainer.strategy.plan.bytes_per_rank,
        }


def _bytes(tensors: Any) -> int:
    return sum(local.numel() * local.element_size() for local in map(dtensor_compat.local_tensor, tensors))


@pytest.mark.parametrize(
    "zero_stage",
    [*(pytest.param(stage, marks=pytest.mark.full) for stage in (1, 2)), 3],
    ids=lambda stage: f"zero{stage}",
)
def test_adamw_over_windows_with_clipping_and_the_bytes_of_each_rank(zero_stage: int) -> None:
    settings = {"optimizer": "adamw", "precision": "64-true", "accumulate": 2, "clip": 0.1}
    training = sharded("gpt-tied", zero_stage, **settings)
    record = run(replace(training, callbacks=(HeldBytes,)))
    assert_parity(record, run_reference(training), ADAMW_FP64)
    whole = 8 * sum(p.numel() for p in pipelined("gpt-tied").module_factory().parameters())
    for [held] in record.observations:
        assert held["parameters"] == held["gradients"]
        assert held["optimizer states"] == 2 * held["parameters"]
        last_row = held["planned"]["parameters"] - held["parameters"]  # 17 words, of which a rank has 9 or 8
        assert last_row in (0, 8 * 16)
        assert held["planned"]["optimizer states"] == 2 * held["planned"]["parameters"]
        assert held["parameters"] < 0.27 * whole  # a quarter, and the copies of shared parameters


def test_gradients_of_a_transformers_model() -> None:
    train_and_assert_parity(sharded("llama", 3, clip=0.1))


class LargeHead(GPT):
    """Its head costs more than a block for short batches, and less for long ones."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(tied=False, **settings)
        self.head = nn.Linear(16, 208, bias=False)


def long_and_short(count: int) -> list[Tensor]:
    """In the order in which Lightning's sampler deals them out, the first pipeline gets long batches."""
    made = batches(count, rows=4)
    order = DistributedSampler(BatchList(made), num_replicas=1, rank=0, shuffle=True, seed=Training.seed)
    return [made[i] if place % 2 == 0 else made[i][:, :5] for place, i in sorted(enumerate(order), key=lambda p: p[1])]


def test_pipelines_whose_batches_balance_differently_cut_alike() -> None:
    strategy = {"zero_stage": 1, "pipeline_parallel_size": 2, "microbatches": 2}
    train_and_assert_parity(Training(LargeHead, long_and_short, strategy=strategy, world_size=4))


@pytest.mark.full
@STAGES
@pytest.mark.parametrize("model", ["gpt-tied", "encoder", "llama", "gpt2", "bert", "vit-timm", "lora-gpt"])
def test_gradients_of_all_models(model: str, zero_stage: int) -> None:
    train_and_assert_parity(sharded(model, zero_stage, clip=0.1))


@pytest.mark.full
@STAGES
def test_adapters(zero_stage: int) -> None:
    # their gradients depend so strongly on the parameters that long steps blow rounding up
    train_and_assert_parity(sharded("lora-peft-llama", zero_stage, clip=0.1, learning_rate=0.1))


def test_reducing_after_each_micro_batch() -> None:
    train_and_assert_parity(sharded("gpt-tied", 2, accumulate=2, strategy={"gradient_sync": "every"}))


@pytest.mark.full
@pytest.mark.parametrize("replicate_size", [1, 2])
def test_clipping_by_value_and_hybrid_sharding(replicate_size: int) -> None:
    strategy = {"replicate_size": replicate_size, "gradient_sync": "last"}
    train_and_assert_parity(sharded("gpt-tied", 3, clip=0.005, clip_algorithm="value", strategy=strategy))


@pytest.mark.parametrize(
    "precision",
    [
        pytest.param("bf16-mixed", marks=pytest.mark.full),
        EffiPrecision("bf16-true", master_weights=True),
        pytest.param(EffiPrecision("bf16-mixed", keep_fp32=("*head",)), marks=pytest.mark.full),
    ],
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
