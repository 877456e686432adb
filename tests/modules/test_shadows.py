"""Shadows run a method in a context for the length of a run; copies and pickles hold no more than the method."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from lightning_effi.modules.shadows import Shadow, Shadows

INSIDE: list[str] = []


@contextmanager
def noted() -> Iterator[None]:
    INSIDE.append("in")
    try:
        yield
    finally:
        INSIDE.append("out")


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.name = "original"

    def step(self) -> str:
        INSIDE.append(self.name)
        return self.name


def ran(call: object) -> list[str]:
    INSIDE.clear()
    assert callable(call)
    call()
    return list(INSIDE)


def test_calls_run_inside_the_context_until_it_is_removed() -> None:
    module, shadows = Named(), Shadows()
    shadows.put(module, "step", noted)
    assert ran(module.step) == ["in", "original", "out"]
    assert module.step.__name__ == "step"
    kept = module.step
    shadows.remove()
    assert "step" not in vars(module)
    assert ran(kept) == ["original"], "what somebody has kept is the method again"


def test_copies_have_a_shadow_of_their_own_method_for_the_length_of_the_run() -> None:
    module, shadows = Named(), Shadows()
    shadows.put(module, "step", noted)
    twin = copy.deepcopy(module)
    twin.name = "twin"
    assert ran(twin.step) == ["in", "twin", "out"]
    shadows.remove()
    assert ran(twin.step) == ["twin"]


def test_pickles_hold_the_method() -> None:
    module, shadows = Named(), Shadows()
    shadows.put(module, "step", noted)
    twin = pickle.loads(pickle.dumps(module))
    twin.name = "twin"
    assert not isinstance(twin.step, Shadow)
    assert ran(twin.step) == ["twin"]


def test_what_stood_on_the_instance_comes_back() -> None:
    module, shadows = Named(), Shadows()
    mine = module.__dict__["step"] = lambda: INSIDE.append("mine")
    shadows.put(module, "step", noted)
    assert ran(module.step) == ["in", "mine", "out"]
    shadows.remove()
    assert vars(module)["step"] is mine
