"""``python -m benchmarks precision`` end to end on a tiny model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.precision import PRECISIONS, main

ROOT = Path(__file__).resolve().parents[2]


def test_report_has_ratios_of_time_and_memory_for_each_precision(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks", "precision", "--quick", "--output", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "precision.txt").read_text()
    assert text.strip() in done.stdout
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
