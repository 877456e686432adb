"""The benchmark's statistics on numbers whose answers are known by hand."""

from __future__ import annotations

import pytest

from benchmarks.statistics import Interval, block_medians, median_interval, paired_ratios


def test_eleven_values_give_the_second_smallest_and_second_largest():
    # P(Binomial(11, 1/2) < 2) = 12 / 2048; one value further in, 67 / 2048, covers only 93.5%.
    values = [7.0, 1.0, 11.0, 4.0, 2.0, 9.0, 3.0, 10.0, 6.0, 8.0, 5.0]
    assert median_interval(values) == Interval(median=6.0, low=2.0, high=10.0, coverage=1 - 2 * 12 / 2048)


def test_twelve_values_give_the_third_smallest_and_third_largest():
    interval = median_interval([float(value) for value in range(1, 13)])
    assert interval == Interval(median=6.5, low=3.0, high=10.0, coverage=1 - 2 * 79 / 4096)


def test_lower_confidence_gives_a_narrower_interval():
    interval = median_interval([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0], confidence=0.5)
    assert interval == Interval(median=4.0, low=3.0, high=5.0, coverage=1 - 2 * 29 / 128)


@pytest.mark.parametrize(("count", "coverage"), [(1, 0.0), (2, 0.5), (3, 0.75), (5, 0.9375), (6, 0.96875)])
def test_few_values_give_the_whole_range_and_its_honest_coverage(count: int, coverage: float):
    values = [float(value) for value in range(count)]
    interval = median_interval(values)
    assert (interval.low, interval.high, interval.coverage) == (0.0, count - 1.0, coverage)


def test_no_values_and_impossible_confidence_are_errors():
    with pytest.raises(ValueError, match="at least one value"):
        median_interval([])
    with pytest.raises(ValueError, match=r"confidence=1\.0"):
        median_interval([1.0], confidence=1.0)


def test_ratios_pair_the_medians_of_the_same_repeat():
    # The machine is three times slower in the second repeat: the ratio does not see it.
    baseline = [[1.0, 2.0, 9.0], [3.0, 6.0, 6.0]]
    variant = [[3.0, 3.0, 3.0], [9.0, 9.0, 1.0]]
    assert block_medians(baseline) == [2.0, 6.0]
    assert paired_ratios(variant, baseline) == [1.5, 1.5]


def test_ratios_of_unequal_repeats_are_an_error():
    with pytest.raises(ValueError, match="cannot pair 1 repeats with 2"):
        paired_ratios([[1.0]], [[1.0], [1.0]])
