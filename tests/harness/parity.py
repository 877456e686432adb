"""The measure of equality between a parallel run and the single-process run on the same data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_effi.verify.compare import compare_tensors
from tests.harness.record import TrainingRecord
from tests.harness.training import Training, run, run_reference


@dataclass(frozen=True)
class Bounds:
    """Largest allowed deviations.

    Attributes:
        gradient: ‖Δg‖ / max(‖g‖, 1e-3·‖g of the whole model‖) for each parameter.
        step: ‖Δp‖ / max(‖p - p₀‖, 1e-3·‖whole step‖) for each parameter, where a deviation in the last bit of an
            element counts as none; None: not compared.
        absolute: Largest |Δp| of any element; None: not compared.
        scalar: Relative error of losses, norms and logged values.
    """

    gradient: float = 1e-5
    step: float | None = 1e-5
    absolute: float | None = None
    scalar: float = 1e-5


SGD_FP32 = Bounds()
ADAMW_FP64 = Bounds(gradient=1e-9, step=None, absolute=1e-9, scalar=1e-9)


def train_and_assert_parity(training: Training, bounds: Bounds = SGD_FP32) -> TrainingRecord:
    """Run ``training`` and its reference, compare them, and return the run's record."""
    record = run(training)
    assert_parity(record, run_reference(training), bounds)
    return record


def assert_parity(record: TrainingRecord, reference: TrainingRecord, bounds: Bounds = SGD_FP32) -> None:
    """Everything the two runs recorded is equal within ``bounds``; initial parameters are equal to the bit.

    Raises:
        AssertionError: Names the step, the worst parameter and its error.
    """
    steps, expected_steps = len(record.gradients), len(reference.gradients)
    assert steps == expected_steps > 0, f"{steps} optimizer steps instead of {expected_steps}"
    for name, initial in reference.parameters[0].items():
        assert torch.equal(record.parameters[0][name], initial), f"{name} is initialised differently"
    # In the order of time, so that what is reported is where the runs part.
    for i in range(steps):
        assert_tensors_close(f"gradients of step {i + 1}", record.gradients[i], reference.gradients[i], bounds.gradient)
        rates, expected_rates = record.learning_rates[i], reference.learning_rates[i]
        assert rates == expected_rates, f"learning rates of step {i + 1} are {rates}, not {expected_rates}"
        _assert_parameters_close(i + 1, record, reference, bounds)
    _assert_close("gradient norms", record.gradient_norms, reference.gradient_norms, bounds.scalar)
    _assert_close("losses", record.losses, reference.losses, bounds.scalar)
    _assert_logged_close(record.logged, reference.logged, bounds.scalar)
    assert record.global_step == reference.global_step, f"global_step {record.global_step}, not {reference.global_step}"


def _assert_parameters_close(step: int, record: TrainingRecord, reference: TrainingRecord, bounds: Bounds) -> None:
    what, ours, theirs = f"parameters after step {step}", record.parameters[step], reference.parameters[step]
    if bounds.step is not None:
        assert_tensors_close(what, ours, theirs, bounds.step, start=reference.parameters[0])
    if bounds.absolute is not None:
        errors = {name: float((ours[name] - theirs[name]).abs().max()) for name in theirs}
        _assert_bounded(f"{what} (absolute)", errors, bounds.absolute)


def _assert_logged_close(ours: Mapping[str, float], theirs: Mapping[str, float], bound: float) -> None:
    assert set(ours) == set(theirs), f"other keys are logged: {sorted(set(ours) ^ set(theirs))}"
    # A value of one step belongs to one micro-batch here and to the mean over ranks there; that of an epoch is alike.
    keys = sorted(key for key in theirs if key.endswith("_epoch"))
    _assert_close(f"logged {keys}", [ours[key] for key in keys], [theirs[key] for key in keys], bound)


def assert_tensors_close(
    what: str,
    ours: Mapping[str, Tensor],
    theirs: Mapping[str, Tensor],
    bound: float,
    start: Mapping[str, Tensor] | None = None,
) -> None:
    """Each tensor deviates by at most ``bound``, relative to its own norm or a thousandth of the whole model's.

    Args:
        start: Where both came from. The norms are then those of the way from there, and what the element type cannot
            resolve next to the start's magnitude is no deviation.
    """
    assert list(ours) == list(theirs), f"{what}: other names: {sorted(set(ours) ^ set(theirs))}"
    for name, tensor in theirs.items():
        shapes = tuple(ours[name].shape), tuple(tensor.shape)
        assert shapes[0] == shapes[1], f"{what}: {name} has shape {shapes[0]}, not {shapes[1]}"
    _assert_bounded(what, relative_errors(ours, theirs, start), bound)


def relative_errors(
    ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], start: Mapping[str, Tensor] | None = None
) -> dict[str, float]:
    """Error of each tensor by the project's measure; see :class:`Bounds`."""
    if start is None:
        return compare_tensors(ours, theirs).distances
    way = {name: tensor.double() - start[name].double() for name, tensor in theirs.items()}
    resolved = {name: _without_last_bit(tensor, theirs[name]) for name, tensor in ours.items()}
    return compare_tensors(resolved, theirs, scale=way).distances


def _without_last_bit(tensor: Tensor, expected: Tensor) -> Tensor:
    """``tensor``, but ``expected`` where the two differ by no more than the last bit of an element."""
    last_bit = torch.finfo(expected.dtype).eps * expected.abs()
    return torch.where((tensor - expected).abs() <= last_bit, expected, tensor)


def _assert_bounded(what: str, errors: Mapping[str, float], bound: float) -> None:
    wrong = {name: error for name, error in errors.items() if not error <= bound}  # NaN is wrong, too
    worst = sorted(wrong, key=lambda name: (not math.isnan(wrong[name]), -wrong[name]))[:5]
    listed = ", ".join(f"{name} {wrong[name]:.2e}" for name in worst)
    assert not wrong, f"{what}: {len(wrong)} of {len(errors)} tensors deviate by more than {bound:g}; worst: {listed}"


def _assert_close(what: str, ours: list[float], theirs: list[float], bound: float) -> None:
    assert len(ours) == len(theirs), f"{what}: {len(ours)} values instead of {len(theirs)}"
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        same = math.isclose(a, b, rel_tol=bound, abs_tol=1e-12) or (math.isnan(a) and math.isnan(b))
        assert same, f"{what}: number {i} is {a!r}, not {b!r}"
