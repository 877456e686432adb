"""A pipeline gives the numbers of the single process on the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pkgutil import resolve_name
from typing import Any

import pytest

from tests.harness import ADAMW_FP64, Training, WorkerError, run, run_reference, train_and_assert_parity
from tests.models import MODELS


def batches_of(model: str, rows: int) -> Callable[[int], list[Any]]:
    return partial(resolve_name(MODELS[model].data), rows=rows)


def pipelined(model: str, stages: int = 2, rows: int = 6, replicas: int = 1, **settings: Any) -> Training:
    case = MODELS[model]
    if case.missing:
        pytest.skip(f"needs {', '.join(case.missing)}")
    strategy = {"pipeline_parallel_size": stages, **settings.pop("strategy", {})}
    module = partial(case.module, **settings.pop("module", {}))
    world_size = stages * replicas
    return Training(module, batches_of(model, rows), strategy=strategy, world_size=world_size, **settings)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(
    "model",
    ["gpt-tied", "gpt-untied", "encoder", "llama", "gpt2", "bert", "vit-timm", "lora-gpt", "lora-peft-llama"],
)
def test_gradients_equal_single_process(model: str, schedule: str) -> None:
    train_and_assert_parity(pipelined(model, strategy={"pipeline": schedule}))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("model", ["gpt-tied", "llama", "bert"])
def test_four_stages(model: str, schedule: str) -> None:
    train_and_assert_parity(pipelined(model, 4, rows=8, strategy={"pipeline": schedule, "microbatches": 8}))


@pytest.mark.parametrize("blocks", [6, 7])
def test_blocks_that_do_not_divide_by_the_stages(blocks: int) -> None:
    train_and_assert_parity(pipelined("gpt-tied", 4, module={"blocks": blocks}))


def test_blocks_per_stage_by_hand() -> None:
    strategy = {"pipeline": {"schedule": "1f1b", "split": [1, 3]}}
    train_and_assert_parity(pipelined("llama", strategy=strategy))


@pytest.mark.parametrize("rows", [1, 5, 7])
@pytest.mark.parametrize("microbatches", [1, 3])
def test_any_number_of_rows_and_micro_batches(rows: int, microbatches: int) -> None:
    training = pipelined("bert", rows=rows, strategy={"microbatches": microbatches})
    train_and_assert_parity(training)


@pytest.mark.parametrize("clip", [("norm", 0.1), ("value", 0.005)], ids=lambda clip: clip[0])
@pytest.mark.parametrize("stages", [2, 4])
def test_clipping_over_all_stages(stages: int, clip: tuple[Any, float]) -> None:
    train_and_assert_parity(pipelined("gpt-tied", stages, clip=clip[1], clip_algorithm=clip[0]))


def test_accumulation() -> None:
    train_and_assert_parity(pipelined("gpt-tied", accumulate=3, clip=0.1))


@pytest.mark.parametrize("model", ["gpt-tied", "encoder", "bert"])  # these compute nothing in fp32 of their own accord
def test_adamw(model: str) -> None:
    train_and_assert_parity(pipelined(model, optimizer="adamw", precision="64-true"), ADAMW_FP64)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_two_pipelines_beside_each_other(accumulate: int) -> None:
    training = pipelined("gpt-tied", 2, replicas=2, strategy={"zero_stage": 0}, accumulate=accumulate, clip=0.1)
    train_and_assert_parity(training)


def test_too_few_blocks() -> None:
    with pytest.raises(WorkerError, match=r"4 pipeline stages need at least 4 blocks, and the step has 3\. Use .*=3"):
        run(pipelined("gpt-tied", 4, module={"blocks": 3}))


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_loss_in_low_precision_is_near_the_single_process(precision: str) -> None:
    training = pipelined("llama", precision=precision, learning_rate=0.05, record_tensors=False, steps=5)
    assert run(training).losses == pytest.approx(run_reference(training).losses, rel=0.02)
