"""``python -m benchmarks overhead`` end to end on a tiny model."""

from __future__ import annotations

import contextlib
import io
import json
from dataclasses import asdict
from statistics import median
from typing import Any

import pytest

from benchmarks.__main__ import main as benchmarks
from benchmarks.model import Size
from benchmarks.overhead import main, parse_arguments, variants_for
from benchmarks.statistics import block_medians, median_interval, paired_ratios


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("overhead")
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert benchmarks(["overhead", "--quick", "--output", str(folder)]) == 0
    text = (folder / "overhead.txt").read_text()
    assert text.strip() in printed.getvalue()
    return {"json": json.loads((folder / "overhead.json").read_text()), "text": text}


def test_report_names_machine_versions_and_commit(report: dict[str, Any]):
    payload = report["json"]
    assert payload["benchmark"] == "overhead"
    assert payload["machine"]["cores"] >= 1
    assert payload["machine"]["cpu"]
    assert set(payload["versions"]) == {"python", "torch", "lightning", "lightning-effi"}
    assert set(payload["commit"]) == {"hash", "modified"}
    assert payload["machine"]["cpu"] in report["text"]
    assert f"torch {payload['versions']['torch']}" in report["text"]


def test_one_process_compares_trainers_with_the_hand_written_loop(report: dict[str, Any]):
    (run,) = report["json"]["runs"]
    assert run["processes"] == 1
    assert [(row["name"], row["baseline"]) for row in run["variants"]] == [
        ("hand loop", None),
        ("stock single-device", "hand loop"),
        ("effi", "hand loop"),
    ]


def test_every_variant_has_all_its_times_and_a_peak(report: dict[str, Any]):
    (run,) = report["json"]["runs"]
    for row in run["variants"]:
        for clock in ("wall", "cpu"):
            assert [len(block) for block in row[clock]["step_seconds"]] == [2, 2, 2]
            assert all(seconds > 0 for block in row[clock]["step_seconds"] for seconds in block)
        assert row["peak_memory_bytes"] > 0


@pytest.mark.parametrize("clock", ["wall", "cpu"])
def test_ratios_follow_from_the_recorded_times(report: dict[str, Any], clock: str):
    (run,) = report["json"]["runs"]
    rows = {row["name"]: row[clock] for row in run["variants"]}
    assert rows["hand loop"]["ratio"] is None
    for name in ("stock single-device", "effi"):
        ratios = paired_ratios(rows[name]["step_seconds"], rows["hand loop"]["step_seconds"])
        assert rows[name]["ratios"] == pytest.approx(ratios)
        interval = median_interval(ratios)
        assert rows[name]["ratio"] == pytest.approx(asdict(interval))
        assert interval.coverage == 0.75
        assert f"{interval.median:.3f}" in report["text"]
        assert rows[name]["median_step_seconds"] == median(block_medians(rows[name]["step_seconds"]))


def test_two_processes_compare_each_stage_with_its_hand_written_loop():
    baselines = {variant.name: variant.baseline for variant in variants_for(2, Size(32, 1, 1, 8))}
    assert baselines["effi stage 0"] == "stock ddp"
    assert baselines["effi stage 1"] == baselines["effi stage 2"] == "hand fully_shard, kept"
    assert baselines["effi stage 3"] == "hand fully_shard, freed"
    assert {name for name in baselines.values() if name} <= set(baselines)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--repeats", "0"], "--repeats must be at least 1"), (["--processes", "0"], "--processes must be at least 1")],
)
def test_impossible_settings_end_with_a_message(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main(arguments)
    assert message in capsys.readouterr().err


def test_default_is_one_and_two_processes_with_enough_repeats_for_95_percent():
    options = parse_arguments([])
    assert options.processes == [1, 2]
    assert median_interval(range(options.repeats)).coverage >= 0.95
