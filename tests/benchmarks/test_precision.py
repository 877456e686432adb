"""``python -m benchmarks precision`` end to end on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.__main__ import main as benchmarks
from benchmarks.precision import PRECISIONS, main


def test_report_has_ratios_of_time_and_memory_for_each_precision(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert benchmarks(["precision", "--quick", "--output", str(tmp_path)]) == 0
    text = (tmp_path / "precision.txt").read_text()
    assert text.strip() in capsys.readouterr().out
    payload = json.loads((tmp_path / "precision.json").read_text())
    assert payload["benchmark"] == "precision"
    assert [row["name"] for row in payload["variants"]] == ["32-true", "16-mixed"]
    baseline, *others = payload["variants"]
    assert baseline["wall"]["ratio"] is None
    for row in others:
        assert row["wall"]["ratio"]["median"] > 0
        assert row["memory_ratio"] == row["peak_memory_bytes"] / baseline["peak_memory_bytes"]
        assert f"{row['memory_ratio']:.2f}" in text
    assert payload["machine"]["cpu"] in text


def test_impossible_settings_end_with_a_message(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--steps", "0"])
    assert {"32-true", "bf16-mixed", "16-mixed"} <= set(PRECISIONS)
    assert "--steps must be at least 1" in capsys.readouterr().err
