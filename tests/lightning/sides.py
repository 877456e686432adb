"""The same user code under stock Lightning and under EffiStrategy, in the same worker processes."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.harness import full_parameters, full_tensor, make_trainer, run_distributed, run_isolated
from tests.lightning.classifier import Classifier

Strategy = Mapping[str, Any] | str | None
Scenario = Callable[..., dict[str, Any]]
STAGES = (0, 1, 2, 3)
# Copies and shards; what differs between stages 1, 2 and 3 concerns the modules alone.
EACH_STAGE = pytest.mark.parametrize("zero_stage", [0, *(pytest.param(n, marks=pytest.mark.full) for n in (1, 2)), 3])

# After AdamW steps in fp64; in fp32, AdamW would make updates of rounding, which differs by processor.
TOLERANCE = 1e-9


_references: dict[tuple[str, str], dict[str, Any]] = {}


def assert_same_as_single_process(
    scenario: Scenario, zero_stage: int, *args: Any, limit: float = 60.0, fresh: bool = False, **settings: Any
) -> list[dict[str, Any]]:
    """Run ``scenario(strategy, *args)`` under EffiStrategy on two ranks and under the stock Trainer in one process.

    ``scenario`` returns what it observed, by name: numbers and tensors must agree to rounding, all else exactly.

    Args:
        limit: seconds that either side may take.
        fresh: processes of its own, for a scenario that leaves something behind.
        settings: further arguments of the strategy.

    Returns:
        The observations under EffiStrategy, by rank.
    """
    key = f"{scenario.__module__}.{scenario.__qualname__}", repr(args)
    if key not in _references:
        _references[key] = run_isolated(scenario, None, *args, timeout=limit, fresh=fresh)
    layout = {"zero_stage": zero_stage, **settings}
    observed = run_distributed(scenario, 2, layout, *args, timeout=limit, fresh=fresh)
    assert _references[key], "the scenario observes nothing"
    for rank, ours in enumerate(observed):
        assert_same(_references[key], ours, f"rank {rank}")
    return observed


def assert_same_as_ddp(scenario: Scenario, zero_stage: int, *args: Any, **settings: Any) -> list[dict[str, Any]]:
    """As :func:`assert_same_as_single_process`, but beside stock ``ddp``: what each rank sees for itself."""
    results = run_distributed(_both, 2, scenario, {"zero_stage": zero_stage, **settings}, args)
    for rank, (stock, ours) in enumerate(results):
        assert stock, "the scenario observes nothing"
        assert_same(stock, ours, f"rank {rank}")
    return [ours for _, ours in results]


def assert_same(expected: Any, actual: Any, where: str) -> None:
    """Compare nested observations; the message names the place of the first difference."""
    if isinstance(expected, Mapping):
        assert list(expected) == list(actual), f"{where}: {list(actual)} instead of {list(expected)}"
        for key, value in expected.items():
            assert_same(value, actual[key], f"{where}: {key}")
    elif isinstance(expected, list | tuple):
        assert len(expected) == len(actual), f"{where}: {actual} instead of {expected}"
        for index, (value, other) in enumerate(zip(expected, actual, strict=True)):
            assert_same(value, other, f"{where}[{index}]")
    elif isinstance(expected, Tensor | float):
        expected_tensor, actual_tensor = torch.as_tensor(expected), torch.as_tensor(actual)
        torch.testing.assert_close(
            actual_tensor, expected_tensor, rtol=TOLERANCE, atol=TOLERANCE, msg=lambda text: f"{where}: {text}"
        )
    else:
        assert actual == expected, f"{where}: {actual!r} instead of {expected!r}"


def _both(scenario: Scenario, settings: Mapping[str, Any], args: tuple[Any, ...]) -> tuple[Any, Any]:
    return in_folder("stock", scenario, "ddp", *args), in_folder("ours", scenario, settings, *args)


def in_folder(name: str, fn: Callable[..., Any], *args: Any) -> Any:
    """Call ``fn`` in a sub-folder that all ranks share, so that what it writes meets nobody else's files."""
    back = os.getcwd()
    os.makedirs(name, exist_ok=True)
    os.chdir(name)
    try:
        return fn(*args)
    finally:
        barrier()
        os.chdir(back)


def barrier() -> None:
    """Wait for the other ranks of this job, if there are any."""
    if dist.is_initialized():
        dist.barrier()


def classifier(seed: int = 5, **settings: Any) -> Classifier:
    """A classifier whose weights depend on ``seed`` alone."""
    pl.seed_everything(seed, verbose=False)
    return Classifier(**settings)


def trainer_for(strategy: Strategy, **flags: Any) -> pl.Trainer:
    """A Trainer on the ranks of this job, in fp64 if not told otherwise."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    return make_trainer(strategy, ranks, **({"precision": "64-true"} | flags))


def weights(module: pl.LightningModule) -> dict[str, Tensor]:
    """Full parameters and buffers by name, on every rank."""
    return {**full_parameters(module), **{name: full_tensor(buffer) for name, buffer in module.named_buffers()}}


def metrics(trainer: pl.Trainer) -> dict[str, float]:
    """What callbacks can monitor, in order of the name."""
    return {key: float(value) for key, value in sorted(trainer.callback_metrics.items())}
