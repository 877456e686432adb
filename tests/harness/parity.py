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
        step: ‖Δp‖ / max(‖p - p₀‖, 1e-3·‖whole way‖) for each parameter, where Δp is what rounding does not explain,
            see :func:`relative_errors`; None: not compared.
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
    _assert_logged_close(record, reference, bounds.scalar)
    assert record.global_step == reference.global_step, f"global_step {record.global_step}, not {reference.global_step}"


def _assert_parameters_close(step: int, record: TrainingRecord, reference: TrainingRecord, bounds: Bounds) -> None:
    what, ours, theirs = f"parameters after step {step}", record.parameters[step], reference.parameters[step]
    if bounds.step is not None:
        assert_tensors_close(what, ours, theirs, bounds.step, start=reference.parameters[0], steps=step)
    if bounds.absolute is not None:
        errors = {name: float((ours[name] - theirs[name]).abs().max()) for name in theirs}
        _assert_bounded(f"{what} (absolute)", errors, bounds.absolute)


def _assert_logged_close(record: TrainingRecord, reference: TrainingRecord, bound: float) -> None:
    ours, theirs = record.logged, reference.logged
    assert set(ours) == set(theirs), f"other keys are logged: {sorted(set(ours) ^ set(theirs))}"
    # Where several ranks see different data, a value of one step is that of one micro-batch in the reference and the
    # mean over ranks here; that of a training epoch is alike.
    alike = {key for key in theirs if key.endswith("_epoch") or f"{key}_epoch" in theirs}
    for key in sorted(theirs if record.data_parallel_size == 1 else alike):
        _assert_close(f"logged {key}", [ours[key]], [theirs[key]], bound)


def assert_tensors_close(
    what: str,
    ours: Mapping[str, Tensor],
    theirs: Mapping[str, Tensor],
    bound: float,
    start: Mapping[str, Tensor] | None = None,
    steps: int = 1,
) -> None:
    """Each tensor deviates by at most ``bound``, relative to its own norm or a thousandth of the whole model's.

    Args:
        start: Where both came from. The norms are then those of the way from there, and what rounding explains is no
            deviation.
        steps: Number of updates since then.
    """
    assert list(ours) == list(theirs), f"{what}: other names: {sorted(set(ours) ^ set(theirs))}"
    for name, tensor in theirs.items():
        shapes = tuple(ours[name].shape), tuple(tensor.shape)
        assert shapes[0] == shapes[1], f"{what}: {name} has shape {shapes[0]}, not {shapes[1]}"
    _assert_bounded(what, relative_errors(ours, theirs, start, steps), bound)


def relative_errors(
    ours: Mapping[str, Tensor],
    theirs: Mapping[str, Tensor],
    start: Mapping[str, Tensor] | None = None,
    steps: int = 1,
) -> dict[str, float]:
    """Error of each tensor by the project's measure; see :class:`Bounds`.

    A parameter is stored anew in every update. Two updates that differ by less than the element type resolves beside
    the parameter are rounded to neighbours, one unit in the last place apart; which of two runs meets such a case
    depends on the order in which the processor's kernels sum. So each of the ``steps`` updates may have moved an
    element by one unit in the last place. Beside a norm weight of 1.0 that is 1e-4 of a clipped step in fp32; of a
    gradient, which is stored once and on its own scale, it is nothing, and gradients get no such allowance.
    """
    if start is None:
        return compare_tensors(ours, theirs).distances
    way = {name: tensor.double() - start[name].double() for name, tensor in theirs.items()}
    unexplained = {name: _beyond_rounding(ours[name], tensor, start[name], steps) for name, tensor in theirs.items()}
    return compare_tensors(unexplained, theirs, scale=way).distances


def _beyond_rounding(tensor: Tensor, expected: Tensor, start: Tensor, steps: int) -> Tensor:
    """``tensor`` moved towards ``expected``, element by element, by the roundings of ``steps`` updates."""
    unit = torch.finfo(expected.dtype).eps * torch.maximum(start.double().abs(), expected.double().abs())
    difference = tensor.double() - expected.double()
    return expected.double() + difference.sign() * (difference.abs() - steps * unit).clamp(min=0.0)


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
