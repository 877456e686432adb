"""With parts of the sequence between split layers, the numbers are those of the stock single-process Trainer."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest

from lightning_effi import TensorParallel
from tests.harness import ADAMW_FP64, SGD_FP32, Bounds, Training, train_and_assert_parity
from tests.models import MODELS, ModelCase
from tests.tensor.architectures import ARCHITECTURES
from tests.tensor.test_parity import BOUNDS

EVERYTHING: dict[str, ModelCase] = {**MODELS, **ARCHITECTURES}


def sequence_parallel(size: int, zero_stage: int = 2) -> dict[str, Any]:
    return {
        "tensor_parallel_size": size,
        "tensor": TensorParallel(sequence_parallel=True),
        "zero_stage": zero_stage,
    }


def train_and_compare(
    model: str, size: int = 2, world_size: int = 2, bounds: Bounds = SGD_FP32, zero_stage: int = 2, **settings: Any
) -> None:
    case = EVERYTHING[model]
    if case.missing:
        pytest.skip(f"needs {', '.join(case.missing)}")
    strategy = sequence_parallel(size, zero_stage)
    train_and_assert_parity(
        Training(case.module, case.batches, strategy=strategy, world_size=world_size, **settings), bounds
    )


@pytest.mark.parametrize("model", EVERYTHING)
def test_two_ranks_equal_single_process(model: str) -> None:
    train_and_compare(model, bounds=BOUNDS.get(model, SGD_FP32))


@pytest.mark.parametrize("model", ["gpt-tied", "encoder", "llama", "gpt2", "llama-kv1-sdpa", "t5"])
def test_four_ranks_equal_single_process(model: str) -> None:
    train_and_compare(model, size=4, world_size=4)


@pytest.mark.parametrize(("model", "zero_stage"), [("gpt-tied", 0), ("llama", 1), ("encoder", 2), ("llama", 3)])
def test_two_by_two_ranks_equal_single_process(model: str, zero_stage: int) -> None:
    train_and_compare(model, world_size=4, zero_stage=zero_stage, clip=0.1, accumulate=2)


@pytest.mark.parametrize("model", ["gpt-tied", "llama"])
def test_adamw_equals_single_process(model: str) -> None:
    train_and_compare(model, optimizer="adamw", precision="64-true", bounds=ADAMW_FP64)


def checkpointing(model: str, **settings: Any) -> pl.LightningModule:
    module = MODELS[model].module(**settings)
    module.model.gradient_checkpointing_enable({"use_reentrant": False})
    return module


def checkpointing_llama(**settings: Any) -> pl.LightningModule:
    return checkpointing("llama", **settings)


@pytest.mark.parametrize(("world_size", "zero_stage"), [(2, 2), (4, 3)])
def test_recomputed_blocks_equal_single_process(world_size: int, zero_stage: int) -> None:
    if missing := MODELS["llama"].missing:
        pytest.skip(f"needs {missing}")
    strategy = sequence_parallel(2, zero_stage)
    train_and_assert_parity(
        Training(checkpointing_llama, MODELS["llama"].batches, strategy=strategy, world_size=world_size)
    )
