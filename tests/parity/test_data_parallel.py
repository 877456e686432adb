"""ZeRO stages 0 to 3 give the numbers of the stock single-process Trainer on the same global batch."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.harness import assert_parity, run, run_reference
from tests.models import MODELS
from tests.parity.matrix import CLIPPING, LAYOUTS, OPTIMIZERS, Combination, combinations, pairwise

STAGES = (0, 1, 2, 3)
MODELS_OF_ALL_KINDS = ("gpt-tied", "gpt-untied", "encoder", "llama", "gpt2", "bert", "vit-batchnorm")


def over(rows: list[Combination], always: Callable[[Combination], bool] = lambda row: True) -> pytest.MarkDecorator:
    """All ``rows``, of which those that need not run ``always`` wait for ``-m full``."""
    marked = [pytest.param(row, marks=() if always(row) else pytest.mark.full, id=str(row)) for row in rows]
    return pytest.mark.parametrize("combination", marked)


def each_model(row: Combination) -> bool:
    """Each model with one stage."""
    return row.zero_stage == (place(row) % 4 if row.model in MODELS_OF_ALL_KINDS else 2)


def each_model_elsewhere(row: Combination) -> bool:
    """Those of different kinds, with another stage than above."""
    return row.zero_stage == (place(row) + 2) % 4


def place(row: Combination) -> int:
    return MODELS_OF_ALL_KINDS.index(row.model)


def each_stage(row: Combination) -> bool:
    """Each stage with one model."""
    return row.zero_stage == place(row)


def on_two(row: Combination) -> bool:
    """Four processes are the dearest; by themselves they are compared above."""
    return row.layout in ("dp1", "dp2")


def train_and_compare(combination: Combination) -> None:
    if missing := MODELS[combination.model].missing:
        pytest.skip(f"needs {', '.join(missing)}")
    training = combination.training()
    reference = run_reference(training)
    if training.clip is not None:
        largest = {
            "norm": min(reference.gradient_norms),
            "value": min(max(float(g.abs().max()) for g in step.values()) for step in reference.gradients),
        }
        assert largest[training.clip_algorithm] > training.clip, "nothing would be clipped"
    assert_parity(run(training), reference, combination.bounds)


@over(combinations(model=tuple(MODELS), zero_stage=STAGES, layout=("dp2",)), each_model)
def test_gradients_equal_single_process(combination: Combination) -> None:
    train_and_compare(combination)


@over(
    combinations(model=MODELS_OF_ALL_KINDS, zero_stage=STAGES, layout=("dp2",), optimizer=("adamw",)),
    each_model_elsewhere,
)
def test_adamw_equals_single_process(combination: Combination) -> None:
    train_and_compare(combination)


@over(combinations(model=MODELS_OF_ALL_KINDS, zero_stage=STAGES, layout=("hybrid2x2",)), each_stage)
def test_hybrid_sharding_equals_single_process(combination: Combination) -> None:
    train_and_compare(combination)


@over(
    pairwise(
        model=MODELS_OF_ALL_KINDS,
        zero_stage=STAGES,
        layout=("dp1", "dp2", "dp4", "hybrid2x2"),
        accumulate=(1, 4),
        clipping=tuple(CLIPPING),
        optimizer=tuple(OPTIMIZERS),
    ),
    on_two,
)
def test_combined_settings_equal_single_process(combination: Combination) -> None:
    train_and_compare(combination)


@pytest.mark.full
@over(
    combinations(
        model=tuple(MODELS),
        zero_stage=STAGES,
        layout=tuple(LAYOUTS),
        accumulate=(1, 4),
        clipping=tuple(CLIPPING),
        optimizer=tuple(OPTIMIZERS),
    )
)
def test_full_matrix_equals_single_process(combination: Combination) -> None:
    train_and_compare(combination)
