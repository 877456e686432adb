"""The loss scale moves as written down, and as torch's own scaler does where that has the same settings."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from lightning_effi.precision.scaling import PATIENCE, LossScaler, LossScaling


def trace(settings: LossScaling, overflows: str) -> list[float]:
    """The scale after each step; ``"x"`` is an overflow, ``"."`` none."""
    scaler = LossScaler(settings)
    scales = []
    for step in overflows:
        scaler.update(step == "x")
        scales.append(scaler.scale)
    return scales


@pytest.mark.parametrize(
    ("settings", "overflows", "expected"),
    [
        ({"growth_interval": 3}, "...x..x...", [64, 64, 128, 64, 64, 64, 32, 32, 32, 64]),
        ({"growth_interval": 3, "hysteresis": 2}, ".xx...x...", [64, 64, 32, 32, 32, 64, 64, 64, 64, 128]),
        ({"growth_interval": 9, "hysteresis": 2}, "xxxx", [64, 32, 16, 8]),  # counted anew by growth alone
        ({"growth_interval": 1, "max_scale": 200.0}, "...", [128, 200, 200]),
        ({"min_scale": 20.0}, "xxx", [32, 20, 20]),
        ({"growth_factor": 1, "backoff_factor": 1, "growth_interval": 1}, ".x.x", [64, 64, 64, 64]),
        ({"growth_factor": 3.0, "backoff_factor": 0.25, "growth_interval": 2}, "..x", [64, 192, 48]),
    ],
    ids=["growth", "hysteresis", "spent hysteresis", "largest", "smallest", "static", "other factors"],
)
def test_scale_moves_as_written_down(settings: dict[str, Any], overflows: str, expected: list[float]) -> None:
    assert trace(LossScaling(init_scale=64.0, **settings), overflows) == expected


def test_scale_moves_as_that_of_torch() -> None:
    settings = LossScaling(init_scale=1024.0, growth_interval=3)
    theirs = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    expected = []
    overflows = "....xx...x......x"
    for step in overflows:
        parameter.grad = theirs.scale(torch.tensor([math.inf if step == "x" else 1.0]))
        theirs.step(optimizer)
        theirs.update()
        expected.append(theirs.get_scale())
    assert trace(settings, overflows) == expected


def test_state_goes_on_in_the_middle_of_an_interval_and_torch_can_load_it() -> None:
    settings = LossScaling(init_scale=64.0, growth_interval=4, hysteresis=2)
    first = LossScaler(settings)
    for step in "..x..":
        first.update(step == "x")
    second = LossScaler(settings)
    second.load_state_dict(first.state_dict())
    for step in "x..x....":
        first.update(step == "x")
        second.update(step == "x")
        assert (first.scale, first.state_dict()) == (second.scale, second.state_dict())
    stock = torch.amp.GradScaler("cpu")
    stock.load_state_dict(first.state_dict())
    assert (stock.get_scale(), stock.get_growth_interval()) == (first.scale, 4)


def test_loaded_scale_obeys_the_bounds_of_the_run() -> None:
    scaler = LossScaler(LossScaling(init_scale=64.0, max_scale=128.0))
    scaler.load_state_dict({"scale": 65536.0, "_growth_tracker": 7})  # what stock Lightning saves has no more for us
    assert scaler.scale == 128.0


@pytest.mark.parametrize(
    "settings",
    [{"init_scale": 2.0}, {"init_scale": 64.0, "growth_factor": 1.0, "backoff_factor": 1.0}],
    ids=["at the smallest scale", "static"],
)
def test_scaler_is_stuck_after_some_overflows_that_nothing_can_be_done_about(settings: dict[str, float]) -> None:
    scaler = LossScaler(LossScaling(**settings))  # type: ignore[arg-type]
    while scaler.can_shrink:
        scaler.update(True)
    for _ in range(PATIENCE - 1):
        scaler.update(True)
        assert not scaler.is_stuck
    scaler.update(False)
    assert not scaler.is_stuck
    for _ in range(PATIENCE):
        scaler.update(True)
    assert scaler.is_stuck


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"init_scale": 0.0}, "init_scale must be a positive number, got 0.0"),
        ({"init_scale": math.inf}, "init_scale must be a positive number, got inf"),
        ({"min_scale": -1.0}, "min_scale must be a positive number"),
        ({"growth_factor": 0.5}, "growth_factor must be at least 1"),
        ({"backoff_factor": 2.0}, "backoff_factor must be at most 1"),
        ({"growth_interval": 0}, "growth_interval must be an integer of at least 1"),
        ({"hysteresis": 1.5}, "hysteresis must be an integer of at least 1"),
        ({"init_scale": 0.5}, "init_scale=0.5 must lie between min_scale=1.0"),
        ({"init_scale": 2.0**30}, "max_scale=16777216.0"),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        LossScaling(**settings)
    assert message in str(caught.value)
