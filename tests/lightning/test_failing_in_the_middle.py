"""An error in the middle of splitting and sharding leaves module and optimizers as before, object by object."""

from __future__ import annotations

import gc
import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import CodeType
from typing import Any
from unittest import mock

import numpy
import pytest
import torch
import torch.distributed as dist

import lightning_effi.at_work
from tests.harness import make_trainer, run_distributed
from tests.lightning.process_state import State, changes, objects_state, optimizer_state, process_state
from tests.lightning.test_process_state import LAYOUTS, Fragile, loader

_PLACES = ("lightning_effi/", "distributed/fsdp/_fully_shard/")
_FIRST, _END = "_detached", "_Staged.verify"  # nothing is changed before; then stages do not fail in the same message
Point = tuple[str, str]


class Handled(Fragile):
    """Has hooks, notes on a parameter, a frozen one, and a list of parameters."""

    def __init__(self) -> None:
        super().__init__("well")
        self.held = list(self.parameters())
        self.head.weight.rate = 0.5  # type: ignore[assignment]
        self.blocks[1].up.bias.requires_grad_(False)  # type: ignore[index, union-attr]
        self.blocks[0].register_forward_hook(lambda *_: None)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        self.made.append(torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9))
        return self.made[-1]


class Calls:
    """Which functions are called for the first time inside of ``parallelize``; one of them can be made to fail.

    Attributes:
        points: the functions, in their order.
    """

    def __init__(self, failing: Point | None = None, error: type[Exception] = Exception) -> None:
        self.points: dict[Point, None] = {}
        self._failing, self._error = failing, error

    @contextmanager
    def watched(self) -> Iterator[None]:
        original = lightning_effi.at_work.parallelize

        def parallelize(*args: Any) -> Any:
            before = sys.getprofile()
            sys.setprofile(self._see)
            try:
                return original(*args)
            finally:
                sys.setprofile(before)

        with mock.patch.object(lightning_effi.at_work, "parallelize", parallelize):
            yield

    def _see(self, frame: Any, event: str, _: Any) -> None:
        point = _point(frame.f_code) if event == "call" else None
        if point is None:
            return
        if point == self._failing:
            sys.setprofile(None)
            raise self._error("planted")
        self.points[point] = None


def _point(code: CodeType) -> Point | None:
    path = code.co_filename
    place = next((path[path.rindex(part) :] for part in _PLACES if part in path), "")
    return (place, code.co_qualname) if place else None


def points_of(layout: str) -> list[Point]:
    """Where each rank comes by; what is called the first time only is left out."""
    for _ in range(2):
        calls = Calls()
        with calls.watched():
            fit(Handled(), layout)
    found: list[list[Point]] = [[], []]
    dist.all_gather_object(found, list(calls.points))
    names = [name for _, name in found[0]]
    end = names.index(_END) if _END in names else None
    return [point for point in found[0][names.index(_FIRST) : end] if point in found[1]]


def fail_at_points(every: Mapping[str, int]) -> tuple[dict[str, Any], float]:
    """By layout and point what an error there leaves; then what the process keeps, and how far training is off."""
    random.seed(5)  # ranks that work on the same batch draw the same numbers
    numpy.random.seed(5)
    process_state()  # imports what it looks at
    torch.manual_seed(5)
    module, twin = Handled().double(), Handled().double()
    twin.load_state_dict(module.state_dict())
    found: dict[str, Any] = {}
    for layout, step in every.items():
        points, around = points_of(layout), process_state()
        module.zero_grad()  # what the run before has left
        for number, point in enumerate(points[::step]):
            found[f"{layout} in {point}"] = fail(module, layout, point, MemoryError if number % 2 else ArithmeticError)
        gc.collect()
        found[f"{layout} around"] = changes(around, process_state())
        fit(module, layout)
        fit(twin, None)
    fit(module, "ddp")
    fit(twin, None)
    wrong = max(float((a - b).abs().max()) for a, b in zip(module.parameters(), twin.parameters(), strict=True))
    return found, wrong


def fail(module: Handled, layout: str, point: Point, error: type[Exception]) -> tuple[Any, ...]:
    trainer = trainer_for(layout)
    parameters, before = dict(module.named_parameters()), state_of(trainer, module)
    raised: tuple[Any, ...] = ()
    try:
        with Calls(point, error).watched():
            trainer.fit(module, loader())
    except error as met:
        raised = str(met), getattr(met, "__notes__", [])
    now, [group] = dict(module.named_parameters()), module.made[-1].param_groups
    plain = torch.optim.SGD(parameters.values(), lr=0.1, momentum=0.9)
    return (
        raised,
        changes(before, state_of(trainer, module)),
        [name for name in parameters if now.get(name) is not parameters[name]],
        [id(p) for p in group["params"]] == [id(p) for p in parameters.values()] and not module.made[-1].state,
        changes(optimizer_state(plain), optimizer_state(module.made.pop())),
    )


def state_of(trainer: Any, module: Handled) -> State:
    state = objects_state(trainer, module)
    for name, p in module.named_parameters():
        state[name] = (p.tolist(), p.requires_grad, p.grad, dict(vars(p)), p.dtype, p.is_leaf, p._backward_hooks)
    return state


def trainer_for(layout: str | None) -> Any:
    settings: Any = "ddp" if layout == "ddp" else None if layout is None else LAYOUTS[layout]
    flags: dict[str, Any] = {"precision": "64-true", "max_steps": 2, "use_distributed_sampler": False}
    return make_trainer(settings, 1 if settings is None else 2, **flags)


def fit(module: Handled, layout: str | None) -> None:
    trainer_for(layout).fit(module, loader())


@pytest.mark.parametrize(
    "every",
    [
        {"zero3": 40, "tp2": 40, "pp2": 40},
        pytest.param({"zero3": 1}, marks=pytest.mark.full),
        pytest.param({"tp2": 1}, marks=pytest.mark.full),
        pytest.param({"pp2": 1}, marks=pytest.mark.full),
        pytest.param({"zero0": 1, "zero1": 2, "micro-batches": 2}, marks=pytest.mark.full),
    ],
    ids="-".join,
)
def test_error_in_the_middle_leaves_no_trace_and_further_runs_train_right(every: dict[str, int]) -> None:
    for found, wrong in run_distributed(fail_at_points, 2, every, timeout=300, fresh=True):
        for name, left in found.items():
            assert left in ({}, (("planted", []), {}, [], True, {})), name
        assert len(found) >= 3 * len(every)
        assert wrong <= 1e-9
