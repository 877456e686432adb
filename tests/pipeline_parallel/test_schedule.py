"""Schedules are values that can be worked out by hand."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator

import pytest

from lightning_effi import EffiStrategy
from lightning_effi.config import Pipeline, Schedule
from lightning_effi.pipeline_parallel.planning.schedule import (
    Action,
    activation_bound,
    forward_schedule,
    legal_microbatches,
    make_schedule,
    place_stages,
)
from lightning_effi.pipeline_parallel.planning.schedule import Schedule as Plan
from lightning_effi.pipeline_parallel.planning.timeline import Timeline
from lightning_effi.pipeline_parallel.running.exchange import Message, plan_messages

NAMES: tuple[Schedule, ...] = ("gpipe", "1f1b", "interleaved", "zb1p", "zbv")
SAME = {"F": 1.0, "B": 1.0, "I": 1.0, "W": 1.0}
BY_HAND = {
    "gpipe": """\
gpipe, 4 micro-batches, bubble 43%
rank 0 F0 F1 F2 F3 .  .  .  .  .  .  B0 B1 B2 B3
rank 1 .  F0 F1 F2 F3 .  .  .  .  B0 B1 B2 B3 .
rank 2 .  .  F0 F1 F2 F3 .  .  B0 B1 B2 B3 .  .
rank 3 .  .  .  F0 F1 F2 F3 B0 B1 B2 B3 .  .  .""",
    "1f1b": """\
1f1b, 4 micro-batches, bubble 43%
rank 0 F0 F1 F2 F3 .  .  .  B0 .  B1 .  B2 .  B3
rank 1 .  F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3 .
rank 2 .  .  F0 F1 .  B0 F2 B1 F3 B2 .  B3 .  .
rank 3 .  .  .  F0 B0 F1 B1 F2 B2 F3 B3 .  .  .""",
    "interleaved": """\
interleaved, 4 micro-batches, bubble 27%
rank 0 F0a F1a F2a F3a F0b F1b F2b F3b .   .   .   B0b .   B1b .   B2b .   B3b B0a B1a B2a B3a
rank 1 .   F0a F1a F2a F3a F0b F1b F2b F3b .   B0b .   B1b .   B2b .   B3b B0a B1a B2a B3a .
rank 2 .   .   F0a F1a F2a F3a F0b F1b F2b B0b F3b B1b .   B2b .   B3b B0a B1a B2a B3a .   .
rank 3 .   .   .   F0a F1a F2a F3a F0b B0b F1b B1b F2b B2b F3b B3b B0a B1a B2a B3a .   .   .""",
    "zb1p": """\
zb1p, 4 micro-batches, bubble 20%
rank 0 F0 F1 F2 F3 .  .  .  I0 W0 I1 W1 I2 W2 I3 W3
rank 1 .  F0 F1 F2 .  .  I0 F3 I1 W0 I2 W1 I3 W2 W3
rank 2 .  .  F0 F1 .  I0 F2 I1 F3 I2 W0 I3 W1 W2 W3
rank 3 .  .  .  F0 I0 F1 I1 F2 I2 F3 I3 W0 W1 W2 W3""",
    "zbv": """\
zbv, 4 micro-batches, bubble 20%
rank 0 F0a F1a F2a F3a .   .   .   F0b I0b W0b F1b I1b W1b F2b I2b W2b F3b I3b W3b I0a W0a .   I1a W1a .   I2a W2a .   I3a W3a
rank 1 .   F0a F1a F2a F3a .   F0b .   F1b I0b W0b F2b I1b W1b F3b I2b W2b I0a W0a I3b W3b I1a W1a .   I2a W2a .   I3a W3a .
rank 2 .   .   F0a F1a F2a F0b F3a F1b .   F2b I0b W0b F3b I1b W1b I0a W0a I2b W2b I1a W1a I3b W3b I2a W2a .   I3a W3a .   .
rank 3 .   .   .   F0a F0b F1a F1b F2a F2b F3a F3b I0b W0b I0a W0a I1b W1b I1a W1a I2b W2b I2a W2a I3b W3b I3a W3a .   .   .""",  # noqa: E501
}


def everything() -> Iterator[tuple[Schedule, int, int, int | None]]:
    """All schedules for many numbers of ranks, micro-batches and stages per rank."""
    for name, ranks, microbatches in itertools.product(NAMES, (2, 3, 4, 8), (1, 2, 3, 4, 5, 7, 8, 12, 16, 17)):
        if legal_microbatches(name, ranks, microbatches) == microbatches:
            for virtual in {"interleaved": (None, 3), "zb1p": (None, 2)}.get(name, (None,)):
                yield name, ranks, microbatches, virtual


@pytest.mark.parametrize("name", NAMES)
def test_four_ranks_and_four_micro_batches_by_hand(name: Schedule) -> None:
    timeline = Timeline.of(make_schedule(name, 4, 4), SAME)
    assert str(timeline).splitlines() == BY_HAND[name].splitlines()


def test_a_backward_takes_two_cells() -> None:
    assert str(Timeline.of(make_schedule("1f1b", 2, 2))).splitlines() == [
        "1f1b, 2 micro-batches, bubble 33%",
        "rank 0 F0 F1 .  .  B0 =  .  B1 =",
        "rank 1 .  F0 B0 =  F1 B1 =  .  .",
    ]


def test_bubbles_are_those_of_the_formulas() -> None:
    for name, ranks, microbatches, virtual in everything():
        count = Pipeline(name, virtual).stages_per_rank
        timeline, idle = Timeline.of(make_schedule(name, ranks, microbatches, virtual)), ranks - 1
        full = microbatches % ranks == 0
        if name in ("gpipe", "1f1b"):
            assert timeline.bubble == pytest.approx(idle / (microbatches + idle))
        elif name == "interleaved" and full:
            assert timeline.bubble == pytest.approx(idle / (count * microbatches + idle))
        elif (name == "zb1p" and full) or (name == "zbv" and microbatches >= 2 * ranks - 1):
            assert timeline.bubble == pytest.approx(idle / (3 * count * microbatches + idle))


def test_activations_that_are_alive_at_once_stay_below_the_bound() -> None:
    for name, ranks, microbatches, virtual in everything():
        live = make_schedule(name, ranks, microbatches, virtual).live_activations()
        bound = activation_bound(name, ranks, microbatches, virtual)
        assert all(most <= allowed for most, allowed in zip(live, bound, strict=True)), (name, ranks, microbatches)
        if name in ("gpipe", "1f1b"):
            assert live == bound


def test_every_stage_runs_every_micro_batch_once() -> None:
    for name, ranks, microbatches, virtual in everything():
        schedule = make_schedule(name, ranks, microbatches, virtual)
        assert schedule.placement == place_stages(name, ranks, virtual)
        kinds = "FIW" if name.startswith("zb") else "FB"
        stages, actions = range(len(schedule.placement)), [action for rank in schedule.ranks for action in rank]
        assert sorted(actions) == sorted(itertools.product(kinds, stages, range(microbatches)))


def test_first_and_last_stage_of_a_v_are_on_rank_0() -> None:
    assert place_stages("zbv", 4) == (0, 1, 2, 3, 3, 2, 1, 0)
    assert place_stages("interleaved", 4) == (0, 1, 2, 3, 0, 1, 2, 3)


@pytest.mark.parametrize(
    ("asked", "ranks", "legal"), [(9, 4, 8), (10, 4, 10), (7, 4, 7), (11, 4, 10), (1, 4, 1), (5, 2, 4), (13, 2, 12)]
)
def test_numbers_of_micro_batches_that_rounds_allow(asked: int, ranks: int, legal: int) -> None:
    for name in ("interleaved", "zb1p"):
        assert legal_microbatches(name, ranks, asked) == legal
    for name in ("gpipe", "1f1b", "zbv"):
        assert legal_microbatches(name, ranks, asked) == asked
    if legal != asked:
        with pytest.raises(ValueError, match=rf"on {ranks} ranks cannot have {asked} micro-batches\. Use {legal}"):
            make_schedule("interleaved", ranks, asked)


def test_messages_are_posted_in_an_order_in_which_nobody_waits_for_ever() -> None:
    """Also where a send is only over once the other side has posted its receive, as with NCCL."""
    for name, ranks, microbatches, virtual in everything():
        schedule = make_schedule(name, ranks, microbatches, virtual)
        for course in (schedule, forward_schedule(schedule.placement, microbatches)):
            assert _goes_through(course), (name, ranks, microbatches, virtual)


def _goes_through(schedule: Plan) -> bool:
    """Run the actions; a message arrives when it is the next one of both its ranks, and has been computed."""
    actions, messages = [deque(actions) for actions in schedule.ranks], plan_messages(schedule)
    to_post = [deque(m for m in messages if rank in (m.source, m.target)) for rank in range(len(actions))]
    waited_for = {message.consumer: message for message in messages}
    done: set[Action] = set()
    arrived: set[Message] = set()
    progress = True
    while progress:
        progress = False
        for rank, mine in enumerate(actions):
            while mine and (mine[0] not in waited_for or waited_for[mine[0]] in arrived):
                if not all(needed in done for needed in schedule.inputs(mine[0])):
                    break
                done.add(mine.popleft())
                progress = True
            while to_post[rank]:
                message = to_post[rank][0]
                if message.producer not in done or to_post[message.source + message.target - rank][0] != message:
                    break
                arrived.add(message)
                to_post[message.source].popleft()
                to_post[message.target].popleft()
                progress = True
    return not any(actions) and not any(to_post)


def test_picture(tmp_path) -> None:
    pytest.importorskip("matplotlib")
    for name in NAMES:
        path = tmp_path / f"{name}.png"
        Timeline.of(make_schedule(name, 4, 8)).save(path)
        assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("pipeline", "message"),
    [
        ({"schedule": "1f1b", "virtual_stages": 2}, "Use 'interleaved'"),
        ({"schedule": "interleaved", "virtual_stages": 1}, "Use '1f1b'"),
        ({"schedule": "zbv", "virtual_stages": 3}, "Use 'zb1p'"),
        ({"schedule": "zb1p", "virtual_stages": 0}, "virtual_stages must be an integer of at least 1 or None"),
        ({"schedule": "interleaved", "split": [1, 3]}, r"split=\[1, 3\] has 2 entries, .* has 4 stages"),
    ],
)
def test_stages_per_rank_that_a_schedule_cannot_have(pipeline: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EffiStrategy(pipeline_parallel_size=2, pipeline=pipeline)
