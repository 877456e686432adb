"""Interleaving and clock, without training anything."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch

from benchmarks import harness
from benchmarks.harness import StepClock, StepTime, Variant, draw_order
from benchmarks.report import format_table


def _never_run(worker: harness.Worker, clock: StepClock) -> None:
    raise AssertionError("ordering must not run variants")


VARIANTS = [
    Variant("a", _never_run),
    Variant("a1", _never_run, "a"),
    Variant("a2", _never_run, "a1"),
    Variant("b", _never_run),
    Variant("b1", _never_run, "b"),
]


def test_order_is_a_permutation_that_keeps_compared_variants_together():
    orders = random.Random(3)
    for _ in range(20):
        names = [variant.name for variant in draw_order(VARIANTS, orders)]
        assert sorted(names) == ["a", "a1", "a2", "b", "b1"]
        families = [name[0] for name in names]
        assert families in (["a"] * 3 + ["b"] * 2, ["b"] * 2 + ["a"] * 3)


def test_same_seed_gives_every_rank_the_same_orders():
    first, second = random.Random(7), random.Random(7)
    assert [draw_order(VARIANTS, first) for _ in range(5)] == [draw_order(VARIANTS, second) for _ in range(5)]


def test_each_variant_comes_first_in_its_family_about_equally_often():
    orders = random.Random(0)
    first = Counter(
        next(variant.name for variant in draw_order(VARIANTS, orders) if variant.name[0] == "a") for _ in range(300)
    )
    assert min(first[name] for name in ("a", "a1", "a2")) > 70


def test_clock_leaves_out_warmup_and_times_from_end_to_end(monkeypatch: pytest.MonkeyPatch):
    wall, cpu = iter([10.0, 20.0, 21.0, 23.0, 26.0]), iter([0.0, 8.0, 8.5, 10.0, 12.0])
    monkeypatch.setattr(harness.time, "perf_counter", lambda: next(wall))
    monkeypatch.setattr(harness.time, "process_time", lambda: next(cpu))
    clock = StepClock(warmup=2, steps=3, device=torch.device("cpu"))
    for _ in range(clock.total_steps):
        clock.tick()
    assert clock.durations() == [StepTime(1.0, 0.5), StepTime(2.0, 1.5), StepTime(3.0, 2.0)]


def test_clock_refuses_a_variant_that_ran_too_few_steps():
    clock = StepClock(warmup=1, steps=3, device=torch.device("cpu"))
    clock.tick()
    with pytest.raises(RuntimeError, match="expected 4 steps, the variant ran 1"):
        clock.durations()


def test_peak_resident_bytes_follows_an_allocation():
    before = harness.peak_resident_bytes()
    # As much as the peak itself, so that it must be passed wherever the process stands now.
    block = torch.ones(before // 4, dtype=torch.float32)
    assert harness.peak_resident_bytes() > before
    assert block[-1] == 1.0


def test_table_aligns_names_left_and_figures_right():
    assert format_table(("name", "ms"), [("a", "10.0"), ("long name", "9.5")]) == (
        "name         ms\n---------  ----\na          10.0\nlong name   9.5"
    )
