"""Which values a step leaves behind it, seen by running it again."""

from __future__ import annotations

import math

import torch
from torch import nn

from lightning_effi.modules.state_changes import changed_by


class Remembers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.tensor([5.0]))  # the first run changes it


def test_nan_in_place_of_zero_is_a_change() -> None:
    module = Remembers()
    values = iter([0.0, math.nan])
    assert changed_by(module, lambda: module.seen.fill_(next(values))) == ["seen"]


def test_nan_that_stays_is_none() -> None:
    module = Remembers()
    assert changed_by(module, lambda: module.seen.fill_(math.nan)) == []
