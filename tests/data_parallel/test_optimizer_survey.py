"""Every optimizer updates shards as it updates whole parameters in one process, or is refused before the first step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from lightning_effi.data_parallel.refuse import refuse_compiled_for_plain
from tests.harness import run_distributed, run_isolated
from tests.harness.parity import assert_tensors_close
from tests.harness.pieces import assemble

pytest.importorskip("timm.optim")

import timm.optim
from timm.optim import kron

from tests.data_parallel.optimizer_survey import STEPS, Trained, names, train_each

LAYOUTS: dict[str, dict[str, Any]] = {
    "zero1": {"zero_stage": 1},
    "zero2": {"zero_stage": 2},
    "zero3": {"zero_stage": 3},
    "tp2": {"tensor_parallel_size": 2},
}
REFUSED = {
    **dict.fromkeys(LAYOUTS, ("torch.LBFGS",)),
    **dict.fromkeys(("zero1", "zero2", "zero3"), ("torch.LBFGS", "timm.kron", "timm.kronc", "timm.kronw")),
}
ELSEWHERE = ("bnb", "fused")  # kernels of libraries that are not installed
SOME = ("torch.Adafactor", "torch.Muon")
ALL = tuple(name for name in names() if not name.partition(".")[2].startswith(ELSEWHERE))


@cache
def in_one_process(optimizers: tuple[str, ...]) -> dict[str, Trained]:
    trained = run_isolated(train_each, list(optimizers), None, 1, timeout=240.0)
    return {name: together([result]) for name, result in trained.items() if not result.error}


def together(ranks: Sequence[Trained]) -> Trained:
    """The first rank's report, with whole parameters in the place of pieces."""
    return replace(ranks[0], parameters=assemble([rank.parameters for rank in ranks], "parameters"))


@pytest.mark.parametrize(
    ("layout", "optimizers"),
    [
        pytest.param("zero3", SOME, id="zero3-some"),
        *(
            pytest.param(layout, ALL[first : first + 12], id=f"{layout}-{first}", marks=pytest.mark.full)
            for first in range(0, len(ALL), 12)
            for layout in LAYOUTS
        ),
    ],
)
def test_updates_equal_single_process(layout: str, optimizers: tuple[str, ...]) -> None:
    expected = in_one_process(optimizers)
    assert expected
    ranks = run_distributed(train_each, 2, list(expected), LAYOUTS[layout], 2, timeout=240.0)
    for name, wanted in expected.items():
        for trained in (rank[name] for rank in ranks):
            if name in REFUSED[layout]:
                assert trained.steps == 0, name
                assert "shards the parameters" in trained.error, name
                continue
            assert not trained.error, f"{name}: {trained.error}"
            assert trained.steps == wanted.steps == STEPS, name
        if name not in REFUSED[layout]:
            trained = together([rank[name] for rank in ranks])
            assert_tensors_close(name, trained.parameters, wanted.parameters, 1e-9)


def test_optimizers_that_compile_for_plain_tensors_are_refused() -> None:
    refused = kron.Kron([torch.nn.Parameter(torch.ones(2, 2))])
    with pytest.raises(ValueError, match="zero_stage=2 shards the parameters, and Kron compiles"):
        refuse_compiled_for_plain([refused], "zero_stage=2")
    refuse_compiled_for_plain([timm.optim.Lamb(refused.param_groups[0]["params"])], "zero_stage=2")
