"""Tensor parallelism gives the numbers of the stock single-process Trainer, on modules nobody prepared."""

from __future__ import annotations

from typing import Any

import pytest

from tests.harness import ADAMW_FP64, SGD_FP32, Bounds, Training, run, run_reference, train_and_assert_parity
from tests.models import MODELS, ModelCase
from tests.tensor_parallel.architectures import ARCHITECTURES, FAMILIES

# Learning rate: half the usual length, since each step makes the rounding of split sums grow, up to tenfold.
SHORT_STEPS = 0.25
EVERYTHING: dict[str, ModelCase] = {**MODELS, **ARCHITECTURES}


def train_and_compare(
    model: str, world_size: int = 2, tensor: int = 2, bounds: Bounds = SGD_FP32, zero_stage: int = 2, **settings: Any
) -> None:
    case = {**EVERYTHING, **FAMILIES}[model]
    if case.missing:
        pytest.skip(f"needs {', '.join(case.missing)}")
    strategy = {"tensor_parallel_size": tensor, "zero_stage": zero_stage}
    if settings.get("optimizer", "sgd") == "sgd":
        settings.setdefault("learning_rate", SHORT_STEPS)
    train_and_assert_parity(
        Training(case.module, case.batches, strategy=strategy, world_size=world_size, **settings), bounds
    )


# Trained in two parts or four by other tests here as well; the others differ from those, or from
# models that are tried here, in the form of attention or of norms alone.
ELSEWHERE = {"gpt-tied", "llama", "bert", "vit-batchnorm", "six-heads", "llama-kv1-sdpa"}
ONE_FORM = {"llama-kv4-sdpa", "llama-kv1-eager", "llama-style", "gpt-untied", "opt", "olmo2"}


@pytest.mark.parametrize(
    "model",
    [pytest.param(m, marks=pytest.mark.full) if m in ELSEWHERE | ONE_FORM else m for m in EVERYTHING],
)
def test_two_ranks_equal_single_process(model: str) -> None:
    train_and_compare(model)


@pytest.mark.full
@pytest.mark.parametrize("model", FAMILIES)
def test_families_equal_single_process(model: str) -> None:
    train_and_compare(model, learning_rate=0.05)


@pytest.mark.full
@pytest.mark.parametrize("model", ["bloom", "falcon-groups", "albert"])
def test_families_on_sharded_parameters_equal_single_process(model: str) -> None:
    train_and_compare(model, world_size=4, zero_stage=3, learning_rate=0.05)


ON_FOUR = ("llama-kv1-sdpa", "six-heads")


@pytest.mark.parametrize(
    "model", [model if model in ON_FOUR else pytest.param(model, marks=pytest.mark.full) for model in EVERYTHING]
)
def test_four_ranks_equal_single_process(model: str) -> None:
    train_and_compare(model, world_size=4, tensor=4)


# Stage 1 by default, 2 in two parts above, and 3 with AdamW below; the other rows with `-m full`.
STAGES_OF = {"gpt-tied": (), "llama": (1,), "phi3": (), "encoder": (), "lora-peft-llama": ()}
CROSSED = [
    pytest.param(model, stage, marks=() if stage in STAGES_OF.get(model, ()) else pytest.mark.full)
    for model in (*STAGES_OF, "vit-batchnorm")
    for stage in (0, 1, 2, 3)
]


@pytest.mark.parametrize(
    ("model", "zero_stage"), CROSSED, ids=lambda value: f"zero{value}" if isinstance(value, int) else value
)
def test_two_by_two_ranks_equal_single_process(model: str, zero_stage: int) -> None:
    train_and_compare(model, world_size=4, zero_stage=zero_stage, clip=0.1, accumulate=2)


@pytest.mark.parametrize(
    "model",
    ["bert", "vit-batchnorm", *(pytest.param(m, marks=pytest.mark.full) for m in ("gpt-tied", "llama", "phi3", "t5"))],
)
def test_adamw_equals_single_process(model: str) -> None:
    train_and_compare(model, optimizer="adamw", precision="64-true", bounds=ADAMW_FP64)


@pytest.mark.parametrize(
    ("model", "zero_stage"),
    [
        ("gpt-tied", 3),
        pytest.param("qwen3", 1, marks=pytest.mark.full),
        pytest.param("gpt-tied", 1, marks=pytest.mark.full),
        pytest.param("qwen3", 3, marks=pytest.mark.full),
    ],
)
def test_adamw_on_two_by_two_ranks_equals_single_process(model: str, zero_stage: int) -> None:
    train_and_compare(
        model, world_size=4, zero_stage=zero_stage, optimizer="adamw", precision="64-true", bounds=ADAMW_FP64, clip=0.1
    )


# Clipped to less, the steps would be so short that fp32 resolves them to little better than 1e-5.
@pytest.mark.parametrize(
    ("model", "clip"),
    [
        ("gpt-tied", ("norm", 0.1)),
        ("llama", ("value", 0.02)),
        pytest.param("llama", ("norm", 0.1), marks=pytest.mark.full),
        pytest.param("gpt-tied", ("value", 0.02), marks=pytest.mark.full),
    ],
    ids=lambda value: value if isinstance(value, str) else value[0],
)
def test_clipping_and_accumulation_equal_single_process(model: str, clip: Any) -> None:
    train_and_compare(model, clip=clip[1], clip_algorithm=clip[0], accumulate=3)


@pytest.mark.parametrize(
    ("model", "world_size", "precision"),
    [
        ("gpt-tied", 2, "bf16-true"),
        *(pytest.param("llama", 4, precision, marks=pytest.mark.full) for precision in ("bf16-mixed", "bf16-true")),
        ("bert", 2, "bf16-mixed"),
    ],
)
def test_losses_in_low_precision_are_near_stock(model: str, world_size: int, precision: str) -> None:
    case = EVERYTHING[model]
    if case.missing:
        pytest.skip(f"needs {', '.join(case.missing)}")
    strategy = {"tensor_parallel_size": 2, "zero_stage": 3}
    training = Training(
        case.module, case.batches, strategy=strategy, world_size=world_size, precision=precision, steps=6,
        learning_rate=0.05, record_tensors=False,
    )  # fmt: skip
    ours, theirs = run(training).losses, run_reference(training).losses
    assert ours == pytest.approx(theirs, abs=0.01 if precision == "bf16-mixed" else 0.05)
