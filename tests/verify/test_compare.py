"""The measure of equality between two sets of gradients."""

from __future__ import annotations

import math

import pytest
import torch

from lightning_effi.verify.compare import FLOOR, compare_tensors

BASE = {"weight": torch.tensor([3.0, 4.0]), "key.bias": torch.tensor([0.0, 1e-9])}


def test_equal_tensors_are_at_distance_zero() -> None:
    comparison = compare_tensors(BASE, BASE)
    assert comparison.distances == {"weight": 0.0, "key.bias": 0.0}
    assert comparison.within(0.0)


def test_distance_is_relative_to_the_tensors_own_norm() -> None:
    comparison = compare_tensors({**BASE, "weight": torch.tensor([3.0, 4.5])}, BASE)
    assert comparison.worst == ("weight", pytest.approx(0.1))
    assert not comparison.within(0.09)
    assert "'weight'" in str(comparison)


def test_rounding_of_a_gradient_that_is_zero_does_not_count() -> None:
    comparison = compare_tensors({**BASE, "key.bias": torch.tensor([1e-9, 0.0])}, BASE)
    assert comparison.distances["key.bias"] == pytest.approx(math.sqrt(2) * 1e-9 / (FLOOR * 5.0))
    assert comparison.within(1e-6)


def test_scale_replaces_the_norm_that_distances_are_relative_to() -> None:
    actual = {**BASE, "weight": torch.tensor([3.0, 4.5])}
    step = {"weight": torch.tensor([0.0, 0.05]), "key.bias": torch.tensor([0.0, 0.0])}
    assert compare_tensors(actual, BASE, scale=step).distances["weight"] == pytest.approx(10.0)


def test_nan_is_the_worst_and_never_within() -> None:
    actual = {"weight": torch.tensor([30.0, 4.0]), "key.bias": torch.tensor([math.nan, 0.0])}
    comparison = compare_tensors(actual, BASE)
    assert comparison.worst[0] == "key.bias"
    assert not comparison.within(math.inf)


def test_other_names_are_never_within() -> None:
    comparison = compare_tensors({"weight": BASE["weight"], "extra": torch.ones(1)}, BASE)
    assert (comparison.missing, comparison.unexpected) == (("key.bias",), ("extra",))
    assert not comparison.within(math.inf)
    assert "missing: key.bias" in str(comparison)
    assert "unexpected: extra" in str(comparison)


def test_nothing_to_compare_is_equal() -> None:
    assert compare_tensors({}, {}).within(0.0)
