"""Changes are taken back in reverse order, all of them, also where one step fails or other ranks are gone."""

from __future__ import annotations

import pytest

from lightning_effi.modules.undo import Undo


def test_steps_run_once_in_reverse() -> None:
    undo, ran = Undo(), []
    undo.push(lambda: ran.append("first"))
    undo.push(lambda: ran.append("second"), collective=True)
    undo.push(lambda: ran.append("third"))
    undo.run()
    undo.run()
    assert ran == ["third", "second", "first"]
    assert len(undo) == 0


def test_without_the_other_ranks_only_local_steps_run() -> None:
    undo, ran = Undo(), []
    undo.push(lambda: ran.append("local"))
    undo.push(lambda: ran.append("collective"), collective=True)
    undo.run(collective=False)
    undo.run()
    assert ran == ["local"]


def test_a_failing_step_stops_no_other_and_is_raised() -> None:
    undo, ran = Undo(), []

    def fail(message: str) -> None:
        raise ValueError(message)

    undo.push(lambda: ran.append("first"))
    undo.push(lambda: fail("outer"))
    undo.push(lambda: fail("inner"))
    with pytest.raises(ValueError, match="inner") as raised:
        undo.run()
    assert ran == ["first"]
    assert any("outer" in note for note in raised.value.__notes__)
