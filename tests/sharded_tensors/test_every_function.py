"""Every function of torch on sharded tensors: the values of plain ones, or an error."""

from __future__ import annotations

import pytest

from tests.harness import run_distributed
from tests.sharded_tensors.every_function import Findings, compare_on_mesh, errors_of_one_part, functions, targets

METHODS = [name for name in functions() if name.startswith("Tensor.")]
# A sharded tensor cannot change its shape in place, nor exchange its memory for another's; gloo has no 16-bit integers.
RAISE = frozenset(
    """
    resize_ resize_as_ set_ t_ transpose_ swapaxes_ swapdims_ unsqueeze_ squeeze_ short
    """.split()  # noqa: SIM905
)


def assert_same(findings: dict[str, Findings]) -> None:
    for kind, found in findings.items():
        assert found.calls > 300, f"{kind}: only {found.calls} calls could be made"
        assert not found.differ, f"{kind}: {found.differ}"
        unexpected = {call: e for call, e in found.raised.items() if call.split("#")[0].split(".")[-1] not in RAISE}
        assert not unexpected, f"{kind}: {unexpected}"


@pytest.mark.parametrize("world_size", [1, 2])
def test_methods_of_tensors_have_the_values_of_plain_tensors(world_size: int) -> None:
    for findings in run_distributed(compare_on_mesh, world_size, ["rows"], METHODS, 1, timeout=120.0, fresh=True):
        assert_same(findings)


def test_ranks_with_one_row_or_none_go_the_way_of_the_others() -> None:
    methods = ["Tensor.addr", "Tensor.index_add_", "Tensor.index_copy_", "Tensor.amax", "Tensor.aminmax", "Tensor.norm"]
    for findings in run_distributed(compare_on_mesh, 2, ["vector", "short"], methods, 3, timeout=120.0, fresh=True):
        for kind, found in findings.items():
            assert found.calls > 10, f"{kind}: only {found.calls} calls could be made"
            assert not found.differ, f"{kind}: {found.differ}"
            assert not found.raised, f"{kind}: {found.raised}"


def test_what_fails_on_one_rank_alone_is_computed_whole_by_all() -> None:
    for plain, sharded in run_distributed(errors_of_one_part, 2, fresh=True):
        assert sharded == plain
        assert plain[:4] == ["RuntimeError", "RuntimeError", "RuntimeError", "_LinAlgError"]


@pytest.mark.full
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("kind", targets())
def test_all_functions_have_the_values_of_plain_tensors(kind: str, world_size: int) -> None:
    for findings in run_distributed(
        compare_on_mesh, world_size, [kind], list(functions()), 3, timeout=300.0, fresh=True
    ):
        assert_same(findings)
