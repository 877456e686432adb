"""Schedules are values that can be worked out by hand."""

from __future__ import annotations

import pytest

from lightning_effi.pipeline.schedule import Timeline, make_schedule

SAME = {"F": 1.0, "B": 1.0}


def rows(name: str, stages: int, microbatches: int) -> list[str]:
    return [" ".join(map(str, actions)) for actions in make_schedule(name, stages, microbatches).ranks]


def test_four_stages_and_four_micro_batches_by_hand() -> None:
    assert rows("1f1b", 4, 4) == [
        "F0 F1 F2 F3 B0 B1 B2 B3",
        "F0 F1 F2 B0 F3 B1 B2 B3",
        "F0 F1 B0 F2 B1 F3 B2 B3",
        "F0 B0 F1 B1 F2 B2 F3 B3",
    ]
    assert rows("gpipe", 4, 4) == ["F0 F1 F2 F3 B0 B1 B2 B3"] * 4


def test_timeline_of_four_stages_by_hand() -> None:
    timeline = Timeline.of(make_schedule("1f1b", 4, 4), SAME)
    assert str(timeline).splitlines() == [
        "1f1b, 4 micro-batches, bubble 43%",
        "rank 0 F0 F1 F2 F3 .  .  .  B0 .  B1 .  B2 .  B3",
        "rank 1 .  F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3 .",
        "rank 2 .  .  F0 F1 .  B0 F2 B1 F3 B2 .  B3 .  .",
        "rank 3 .  .  .  F0 B0 F1 B1 F2 B2 F3 B3 .  .  .",
    ]


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("stages", "microbatches"), [(2, 1), (2, 5), (4, 8), (4, 9), (4, 3), (8, 32)])
def test_bubble_is_that_of_the_formula(name: str, stages: int, microbatches: int) -> None:
    timeline = Timeline.of(make_schedule(name, stages, microbatches))
    assert timeline.bubble == pytest.approx((stages - 1) / (microbatches + stages - 1))
    assert timeline.makespan == pytest.approx(3 * (microbatches + stages - 1))


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 5), (4, 8), (4, 3)])
def test_activations_that_are_alive_at_once(stages: int, microbatches: int) -> None:
    assert make_schedule("gpipe", stages, microbatches).live_activations() == [microbatches] * stages
    bound = [min(stages - stage, microbatches) for stage in range(stages)]
    assert make_schedule("1f1b", stages, microbatches).live_activations() == bound


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_every_micro_batch_once_forward_and_once_backward(name: str) -> None:
    for actions in make_schedule(name, 3, 7).ranks:
        assert len(actions) == len(set(actions)) == 14


def test_picture(tmp_path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "timeline.png"
    Timeline.of(make_schedule("1f1b", 4, 8)).save(path)
    assert path.read_bytes().startswith(b"\x89PNG")
