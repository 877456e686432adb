"""``python -m benchmarks pipeline`` end to end, with short sleeps and a tiny model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.known_durations import bubble_formula
from benchmarks.pipeline import main, parse_arguments, settings_for
from benchmarks.statistics import median_interval


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("pipeline")
    assert main(["--quick", "--output", str(folder)]) == 0
    return {
        "json": json.loads((folder / "pipeline.json").read_text()),
        "text": Path(folder / "pipeline.txt").read_text(),
    }


def test_every_schedule_stands_beside_its_ideal_and_its_bound(report: dict[str, Any]) -> None:
    rows = report["json"]["durations"]["rows"]
    assert [row["schedule"] for row in rows] == ["gpipe", "1f1b", "interleaved", "zb1p", "zbv"]
    for row in rows:
        assert row["schedule"] in report["text"]
        assert row["ratio"] >= row["best_ratio"] > 0.99  # nobody is faster than the ideal
        assert row["bubble"] == pytest.approx(row["bubble_formula"])
        assert row["live"] == row["live_planned"]
        assert all(live <= bound for live, bound in zip(row["live"], row["live_bound"], strict=True))


def test_a_step_is_compared_with_the_loop_by_hand(report: dict[str, Any]) -> None:
    by_hand, ours = report["json"]["loop"]["variants"]
    assert by_hand["wall"]["ratio"] is None
    assert ours["wall"]["ratio"]["low"] <= ours["wall"]["ratio"]["median"] <= ours["wall"]["ratio"]["high"]
    assert len(ours["wall"]["ratios"]) == 3
    assert "Schedule1F1B by hand" in report["text"]


def test_formulas_of_the_bubbles() -> None:
    assert bubble_formula("1f1b", 4, 8) == pytest.approx(3 / 11)
    assert bubble_formula("interleaved", 4, 8) == pytest.approx(3 / 19)
    assert bubble_formula("zb1p", 4, 8) == pytest.approx(3 / 27)
    assert bubble_formula("zbv", 4, 8) == pytest.approx(3 / 51)


def test_default_is_four_ranks_and_enough_repeats_for_95_percent() -> None:
    durations, loop = settings_for(parse_arguments([]))
    assert (durations.ranks, durations.microbatches) == (4, (8, 16))
    assert durations.block_seconds >= 0.05
    assert median_interval(range(loop.repeats)).coverage >= 0.95


def test_layers_that_cannot_be_halved_end_with_a_message(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--layers", "5"])
    assert "--layers must be a multiple of 2" in capsys.readouterr().err
