import pytest

from tests.tensor.test_hooks import observe, run_distributed, run_isolated


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_dbg(stage):
    expected = run_isolated(observe, True, None, 1)
    for observed in run_distributed(observe, 2, True, {"zero_stage": stage}, 1):
        for ours, theirs in zip(observed, expected, strict=True):
            assert ours == {name: pytest.approx(value, rel=1e-5) for name, value in theirs.items()}
