"""Changes are taken back in reverse order, all of them, also where one step fails or other ranks are gone."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_effi.modules.undo import Undo
from tests.harness import make_trainer, run_distributed


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


def test_changes_are_listed_when_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    undo = Undo()
    undo.push(list, "silent")
    with caplog.at_level(logging.DEBUG, "lightning_effi"):
        undo.push(dict.fromkeys("a").clear, "a table")
        undo.push(list, collective=True)
        undo.run(collective=False)
    made, gathered, *rest = caplog.messages
    assert made.startswith("change: a table; by test_undo.py:")
    assert made.endswith("until the end of the run, also after an error")
    assert gathered.startswith("change: list; by test_undo.py:")
    assert rest == ["left, since other ranks are gone: list", "taken back: a table", "taken back: silent"]


def changes_of(settings: dict[str, Any]) -> list[str]:
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("lightning_effi")
    logger.setLevel(logging.DEBUG)
    logger.addHandler(handler)
    trainer = make_trainer(settings, 2, max_steps=1, use_distributed_sampler=False)
    trainer.fit(BoringModel(), torch.utils.data.DataLoader(torch.ones(4, 32), batch_size=2))
    return messages


def test_a_run_lists_what_it_changes_and_takes_all_of_it_back() -> None:
    messages = run_distributed(changes_of, 2, {"zero_stage": 2}, fresh=True)[0]
    made = [message.removeprefix("change: ").split(";")[0] for message in messages if message.startswith("change: ")]
    back = [message.removeprefix("taken back: ") for message in messages if message.startswith("taken back: ")]
    assert sorted(made) == sorted(back)
    assert {"DTensor.__torch_function__", "update of Lightning's _ResultMetric"} < set(made)
    assert any("; by sharded_tensors/installation.py:" in message for message in messages)
