"""Module shapes from published code train as in a single process, and their validation sees the same numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from lightning_effi import TensorParallel
from tests.harness import Training, run_reference, train_and_assert_parity
from tests.models.gpt import batches
from tests.tensor_parallel import habits

SHAPES: dict[str, Callable[..., Any]] = {
    "own-loss-on-logits": habits.SequenceToSequence,
    "own-schedule": habits.ReversePredictor,
    "sequence-first": habits.PixelGPT,
    "sequence-first-classifier": habits.classifying_pixels,
    "inner-methods": habits.InnerMethods,
    "shared-block": habits.SharedBlock,
    "attentions-in-a-list": habits.AttentionsInAList,
    "teacher": habits.Distilling,
}
GENERATE = ("own-loss-on-logits", "inner-methods", "teacher")


def train_and_compare(shape: str, world_size: int = 2, zero_stage: int = 2, sequence_parallel: bool = False) -> None:
    if shape == "own-loss-on-logits":
        pytest.importorskip("transformers")
    training = Training(
        SHAPES[shape],
        batches,
        strategy={
            "tensor_parallel_size": 2,
            "zero_stage": zero_stage,
            "tensor": TensorParallel(sequence_parallel=sequence_parallel),
        },
        world_size=world_size,
        callbacks=(habits.Generated,),
    )
    record, reference = train_and_assert_parity(training), run_reference(training)
    if world_size > 2:
        return  # several data-parallel ranks validate on other rows than one
    assert record.observations == [reference.observations[0]] * 2
    assert bool(record.observations[0][0]) == (shape in GENERATE)
    assert {key: value for key, value in record.logged.items() if key.startswith("val")} == pytest.approx(
        {key: value for key, value in reference.logged.items() if key.startswith("val")}, rel=1e-5
    )


@pytest.mark.parametrize("shape", SHAPES)
def test_habits_equal_single_process(shape: str) -> None:
    train_and_compare(shape)


@pytest.mark.parametrize("shape", [name if name == "own-loss-on-logits" else pytest.param(name, marks=pytest.mark.full)
                                   for name in SHAPES])  # fmt: skip
def test_habits_on_parts_of_the_sequence_equal_single_process(shape: str) -> None:
    train_and_compare(shape, sequence_parallel=True)


# The single process takes the rows of each data-parallel rank as a batch of its own, and would move the teacher twice.
@pytest.mark.parametrize("shape", [name for name in SHAPES if name != "teacher"])
@pytest.mark.full
def test_habits_on_sharded_parameters_equal_single_process(shape: str) -> None:
    train_and_compare(shape, world_size=4, zero_stage=3)
