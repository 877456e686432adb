"""Everything in 16 bits, over every axis: losses stay near those of fp32."""

from __future__ import annotations

import pytest

from lightning_effi import EffiPrecision
from tests.harness import Training, run, run_reference
from tests.models.gpt import GPT, batches
from tests.precision.runs import under

# Both round weights of order one to 2^-11 and 2^-8; six short steps add up less than a few such roundings.
BOUNDS = {"16-true": 0.01, "bf16-true": 0.03}


@pytest.mark.parametrize("precision", BOUNDS)
@pytest.mark.parametrize("layout", ["zero3", "tp2", "pp2"])
def test_losses_are_near_fp32(layout: str, precision: str) -> None:
    training = Training(GPT, batches, steps=6, learning_rate=0.05, record_tensors=False)
    losses = run(under(layout, training, EffiPrecision(precision))).losses
    expected = run_reference(under(layout, training, EffiPrecision("32-true"))).losses
    assert losses == pytest.approx(expected, rel=BOUNDS[precision])
