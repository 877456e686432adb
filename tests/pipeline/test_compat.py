"""Private names of torch that pipelines rely on."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from lightning_effi import _compat


def test_fake_tensors_have_shapes_and_take_constants_from_outside() -> None:
    mode, outside = _compat.fake_tensor_mode(), torch.ones(4)
    with mode:
        result = nn.Linear(4, 3)(torch.empty(2, 4) + outside)
    assert result.shape == (2, 3)
    assert type(result).__name__ == "FakeTensor"
    assert mode.from_tensor(outside).shape == (4,)


def test_process_that_was_not_seeded_is_known(monkeypatch) -> None:
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    assert _compat.is_seeded()
    pl.seed_everything(5, verbose=False)
    assert _compat.is_seeded()
    torch.manual_seed(6)
    assert not _compat.is_seeded()
    monkeypatch.delenv("PL_GLOBAL_SEED")


@pytest.mark.parametrize(("name", "stages", "kinds"), [("interleaved", 2, "BF"), ("zb1p", 1, "FIW"), ("zbv", 2, "FIW")])
def test_order_of_a_pipeline(name: str, stages: int, kinds: str) -> None:
    orders = _compat.pipeline_order(name, 2, stages, 4)
    assert len(orders) == 2
    for actions in orders:
        assert {kind for kind, _, _ in actions} == set(kinds)
        assert len(set(actions)) == len(actions) == len(kinds) * stages * 4
