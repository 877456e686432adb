"""Fused and multi-tensor optimizers step and clip on a mixture of split, sharded and whole parameters."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from tests.harness import ADAMW_FP64, Training, train_and_assert_parity
from tests.models.gpt import GPT, batches

LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2-zero3": {"tensor_parallel_size": 2, "zero_stage": 3},
    "tp2-pp2": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
    "pp2-zero2": {"pipeline_parallel_size": 2, "zero_stage": 2},
}
CLIPPING = {"norm": 0.1, "value": 0.005}


class WithKind(GPT):
    def __init__(self, kind: str, **settings: Any) -> None:
        super().__init__(**settings)
        self.kind = kind

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3, weight_decay=0.1, **{self.kind: True})


@pytest.mark.parametrize(
    ("layout", "kind", "algorithm"),
    [
        ("tp2-pp2", "foreach", "norm"),
        ("pp2-zero2", "fused", "value"),
        *(
            pytest.param(layout, kind, algorithm, marks=pytest.mark.full)
            for layout, kind, algorithm in (
                ("tp2-zero3", "fused", "norm"),
                ("tp2-zero3", "foreach", "value"),
                ("tp2-zero3", "foreach", "norm"),
                ("tp2-pp2", "fused", "value"),
                ("pp2-zero2", "foreach", "norm"),
            )
        ),
    ],
)
def test_updates_equal_single_process(layout: str, kind: str, algorithm: str) -> None:
    training = Training(
        partial(WithKind, kind), batches, strategy=LAYOUTS[layout], world_size=4, clip=CLIPPING[algorithm],
        clip_algorithm=algorithm, precision="64-true",
    )  # fmt: skip
    train_and_assert_parity(training, ADAMW_FP64)
