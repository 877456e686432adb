"""Robust summaries of paired timings: medians with exact, distribution-free confidence intervals."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Interval:
    """A median with its confidence interval.

    ``coverage`` is the probability that the interval holds the true median. It is at least the confidence asked for,
    unless there are too few values for that (fewer than 6 for 95%); then the interval spans all of them.
    """

    median: float
    low: float
    high: float
    coverage: float


def median_interval(values: Sequence[float], confidence: float = 0.95) -> Interval:
    """Order-statistics interval for the median.

    The number of values below the true median is Binomial(n, 1/2) whatever their distribution, so the interval from
    the k-th smallest to the k-th largest value covers it with probability 1 - 2 P(Binomial(n, 1/2) < k). The largest k
    that reaches ``confidence`` is taken. Unlike a bootstrap this needs no randomness and does not undercover at the
    five to twenty repeats that a benchmark can afford.

    Raises:
        ValueError: ``values`` is empty or ``confidence`` is not strictly between 0 and 1.
    """
    if not values:
        raise ValueError("median_interval needs at least one value")
    if not 0.0 < confidence < 1.0:
        raise ValueError(f"confidence={confidence} must lie strictly between 0 and 1")
    ordered = sorted(values)
    n = len(ordered)
    k, coverage = 1, _coverage(n, 1)
    while 2 * (k + 1) <= n and _coverage(n, k + 1) >= confidence:
        k += 1
        coverage = _coverage(n, k)
    return Interval(statistics.median(ordered), ordered[k - 1], ordered[n - k], coverage)


def _coverage(n: int, k: int) -> float:
    """Probability that the median lies between the k-th smallest and the k-th largest of ``n`` values."""
    return max(0.0, 1.0 - 2.0 * sum(math.comb(n, i) for i in range(k)) / 2**n)


def block_medians(blocks: Sequence[Sequence[float]]) -> list[float]:
    """One figure per repeat: the median of the steps timed in that repeat's block."""
    return [statistics.median(block) for block in blocks]


def paired_ratios(blocks: Sequence[Sequence[float]], baseline: Sequence[Sequence[float]]) -> list[float]:
    """Per repeat, the variant's median step time over its baseline's in the same repeat.

    A machine that slows down for a while slows both blocks of a repeat and leaves their ratio alone.

    Raises:
        ValueError: the two were not measured in the same number of repeats.
    """
    if len(blocks) != len(baseline):
        raise ValueError(f"cannot pair {len(blocks)} repeats with {len(baseline)}")
    return [ours / theirs for ours, theirs in zip(block_medians(blocks), block_medians(baseline), strict=True)]
