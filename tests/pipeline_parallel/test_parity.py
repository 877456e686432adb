"""A pipeline gives the numbers of the single process on the whole batch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pkgutil import resolve_name
from typing import Any

import pytest
from torch import Tensor, nn

from tests.harness import ADAMW_FP64, Training, WorkerError, run, run_reference, train_and_assert_parity
from tests.models import MODELS
from tests.models.gpt import GPT, batches


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


SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb1p", "zbv")
MODEL_NAMES = (
    "gpt-tied", "gpt-untied", "encoder", "llama", "gpt2", "bert", "vit-timm", "lora-gpt", "lora-peft-llama",
)  # fmt: skip
# Every model and every schedule at least once; the others behind the marker "full".
CHOSEN = {
    ("gpt-tied", "zbv"), ("gpt-untied", "gpipe"), ("encoder", "interleaved"), ("llama", "zb1p"), ("gpt2", "zbv"),
    ("bert", "zb1p"), ("vit-timm", "1f1b"), ("lora-gpt", "interleaved"), ("lora-peft-llama", "1f1b"),
}  # fmt: skip


def over(names: Sequence[str], chosen: Collection[tuple[str, str]]) -> pytest.MarkDecorator:
    """All schedules for each name; those that are not ``chosen`` are marked ``full``."""
    return pytest.mark.parametrize(
        ("name", "schedule"),
        [
            pytest.param(*pair, marks=() if pair in chosen else pytest.mark.full)
            for pair in itertools.product(names, SCHEDULES)
        ],
    )


@over(MODEL_NAMES, CHOSEN)
def test_gradients_equal_single_process(name: str, schedule: str) -> None:
    train_and_assert_parity(pipelined(name, strategy={"pipeline": schedule}))


@over(("gpt-tied", "llama", "bert"), {("llama", "1f1b")})
def test_four_ranks(name: str, schedule: str) -> None:
    strategy = {"pipeline": schedule, "microbatches": 8}
    train_and_assert_parity(pipelined(name, 4, rows=8, module={"blocks": 8}, strategy=strategy))


@pytest.mark.parametrize(("blocks", "schedule"), [pytest.param(6, "1f1b", marks=pytest.mark.full), (7, "zb1p")])
def test_blocks_that_do_not_divide_by_the_ranks(blocks: int, schedule: str) -> None:
    train_and_assert_parity(pipelined("gpt-tied", 4, module={"blocks": blocks}, strategy={"pipeline": schedule}))


@pytest.mark.parametrize(
    ("blocks", "schedule"),
    [(7, "zbv"), *(pytest.param(n, name, marks=pytest.mark.full) for n, name in [(6, "interleaved"), (6, "zbv")])],
)
def test_blocks_that_do_not_divide_by_the_virtual_stages(blocks: int, schedule: str) -> None:
    train_and_assert_parity(pipelined("gpt-tied", module={"blocks": blocks}, strategy={"pipeline": schedule}))


@pytest.mark.full
@pytest.mark.parametrize("pipeline", [("interleaved", 3), ("zb1p", 2)], ids=lambda pipeline: pipeline[0])
def test_other_numbers_of_virtual_stages(pipeline: tuple[str, int]) -> None:
    strategy = {"pipeline": {"schedule": pipeline[0], "virtual_stages": pipeline[1]}, "microbatches": 4}
    train_and_assert_parity(pipelined("gpt-tied", module={"blocks": 6}, strategy=strategy))


def test_blocks_per_stage_by_hand() -> None:
    strategy = {"pipeline": {"schedule": "1f1b", "split": [1, 3]}}
    train_and_assert_parity(pipelined("llama", strategy=strategy))


@pytest.mark.parametrize(
    ("rows", "microbatches", "schedule"),
    [
        (1, 3, "1f1b"),
        (7, 1, "zbv"),
        (7, 5, "interleaved"),  # which cannot have 5 on 2 ranks, and takes 4
        *(
            pytest.param(rows, microbatches, schedule, marks=pytest.mark.full)
            for rows, microbatches, schedule in itertools.product((1, 5, 7), (1, 3, 5), SCHEDULES)
        ),
    ],
)
def test_any_number_of_rows_and_micro_batches(rows: int, microbatches: int, schedule: str) -> None:
    strategy = {"microbatches": microbatches, "pipeline": schedule}
    train_and_assert_parity(pipelined("bert", rows=rows, strategy=strategy))


@pytest.mark.parametrize("clip", [("norm", 0.1), ("value", 0.005)], ids=lambda clip: clip[0])
@pytest.mark.parametrize(("stages", "schedule"), [(2, "interleaved"), pytest.param(4, "1f1b", marks=pytest.mark.full)])
def test_clipping_over_all_stages(stages: int, schedule: str, clip: tuple[Any, float]) -> None:
    strategy = {"pipeline": schedule}
    train_and_assert_parity(pipelined("gpt-tied", stages, clip=clip[1], clip_algorithm=clip[0], strategy=strategy))


@pytest.mark.parametrize(
    "schedule", ["zbv", *(pytest.param(name, marks=pytest.mark.full) for name in SCHEDULES if name != "zbv")]
)
def test_accumulation(schedule: str) -> None:
    train_and_assert_parity(pipelined("gpt-tied", accumulate=3, clip=0.1, strategy={"pipeline": schedule}))


class InPlace(GPT):
    """Every block works in place on what it is given, also on what its stage has received."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.blocks = nn.ModuleList(AddsInPlace() for _ in self.blocks)


class AddsInPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x.add_(self.linear(0.5 * x))


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_blocks_that_work_in_place_on_what_a_stage_received(schedule: str) -> None:
    strategy = {"pipeline_parallel_size": 2, "pipeline": schedule}
    train_and_assert_parity(Training(InPlace, partial(batches, rows=4), strategy=strategy, world_size=2))


# These compute nothing in fp32 of their own accord.
@pytest.mark.parametrize("model", ["bert", *(pytest.param(m, marks=pytest.mark.full) for m in ("gpt-tied", "encoder"))])
def test_adamw(model: str) -> None:
    train_and_assert_parity(pipelined(model, optimizer="adamw", precision="64-true"), ADAMW_FP64)


@pytest.mark.parametrize("accumulate", [pytest.param(1, marks=pytest.mark.full), 3])
def test_two_pipelines_beside_each_other(accumulate: int) -> None:
    training = pipelined("gpt-tied", 2, replicas=2, strategy={"zero_stage": 0}, accumulate=accumulate, clip=0.1)
    train_and_assert_parity(training)


def test_too_few_blocks() -> None:
    with pytest.raises(WorkerError, match=r"4 pipeline stages need at least 4 blocks, and the step has 3\. Use .*=3"):
        run(pipelined("gpt-tied", 4, module={"blocks": 3}))


def test_too_few_blocks_for_virtual_stages() -> None:
    message = r"4 pipeline stages, 2 on each of 2 ranks, need at least 4 blocks, and the step has 3\. Use .*'1f1b'"
    with pytest.raises(WorkerError, match=message):
        run(pipelined("gpt-tied", module={"blocks": 3}, strategy={"pipeline": "interleaved"}))


@pytest.mark.parametrize(("precision", "schedule"), [("bf16-mixed", "zb1p"), ("bf16-true", "1f1b")])
def test_loss_in_low_precision_is_near_the_single_process(precision: str, schedule: str) -> None:
    strategy = {"pipeline": schedule}
    training = pipelined(
        "llama", strategy=strategy, precision=precision, learning_rate=0.05, record_tensors=False, steps=5
    )
    assert run(training).losses == pytest.approx(run_reference(training).losses, rel=0.02)
