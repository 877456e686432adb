"""Tensor parallelism within the stages of a pipeline, and with micro-batches."""

from __future__ import annotations

from typing import Any

import pytest

from tests.harness import ADAMW_FP64, Training, train_and_assert_parity
from tests.pipeline_parallel.test_parity import pipelined


def crossed(model: str, **settings: Any) -> Training:
    """Two stages of two ranks each."""
    strategy = {"tensor_parallel_size": 2, "microbatches": 3, **settings.pop("strategy", {})}
    return pipelined(model, 2, replicas=2, strategy=strategy, **settings)


@pytest.mark.parametrize("model", [pytest.param("gpt-tied", marks=pytest.mark.full), "llama"])
def test_gradients_equal_single_process(model: str) -> None:
    train_and_assert_parity(crossed(model, clip=0.1))


@pytest.mark.full
@pytest.mark.parametrize("model", ["encoder", "gpt2", "bert", "vit-timm", "lora-peft-llama"])
def test_gradients_of_further_models(model: str) -> None:
    train_and_assert_parity(crossed(model, clip=0.1))


@pytest.mark.full
@pytest.mark.parametrize("zero_stage", [0, 2, 3])
def test_on_eight_ranks_with_zero(zero_stage: int) -> None:
    training = pipelined(
        "llama", 2, replicas=4, strategy={"tensor_parallel_size": 2, "zero_stage": zero_stage}, clip=0.1
    )
    train_and_assert_parity(training)


def test_adamw_over_accumulation_windows() -> None:
    train_and_assert_parity(crossed("gpt-tied", optimizer="adamw", precision="64-true", accumulate=2), ADAMW_FP64)


def test_micro_batches_without_a_pipeline() -> None:
    strategy = {"tensor_parallel_size": 2, "microbatches": 3}
    train_and_assert_parity(pipelined("llama", 1, replicas=2, strategy=strategy, clip=0.1))
