"""Which functions write into their first argument: what their names say is what they do."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_effi.sharded_tensors.names import Sensitivity, is_in_place, sensitivity

METHODS = sorted(name for name in dir(Tensor) if callable(getattr(Tensor, name, None)))
DUNDERS = {name for name in METHODS if name.startswith("__") and name.endswith("__")}
UNDERSCORED = {name for name in METHODS if name.endswith("_") and not name.endswith("__")}
# They write into the object in Python, not into the tensor.
OF_THE_OBJECT = {"__init__", "__setattr__", "__setstate__", "__delattr__"}
# What they write cannot be seen here: flags, sparse tensors, targets of another shape or dtype, what is so already.
UNSEEN = {
    *("_coalesced_", "_philox_normal_", "_philox_uniform_", "addmv_", "baddbmm_", "detach_", "float_power_"),
    *("index_reduce_", "resize_as_", "resize_as_sparse_", "sparse_resize_", "sparse_resize_and_clear_"),
}
TARGETS = ([[1.5, 2.5], [3.5, 4.5]], [[1, 2], [3, 4]], [[True, False], [False, True]])


def forms(target: Tensor) -> list[tuple[Any, ...]]:
    """Arguments, some of which nearly every method takes."""
    other, index = torch.ones_like(target) + target, torch.tensor([0, 1])
    numbers: list[tuple[Any, ...]] = [(), (0,), (2,), (0.7,), (0, 1), (2, 2), ((1, 4),), ((1, 4), (4, 1)), (2, 0, 0.5)]
    tensors: list[tuple[Any, ...]] = [(other,), (other, other), (other, 0.7), (0, index, other), (0, index, 2)]
    vector = other[0].clone()
    many: list[tuple[Any, ...]] = [(0, torch.tensor([[1, 0]]), other), (index, other[0]), ((index,), other[0])]
    batches = [(vector, vector), (other, vector), (other[None], other[None]), (other > 1, other), (target,)]
    functions = [(lambda a: a + 1,), (other, max), (other, other, lambda a, b, c: a + b + c), (other > 1, 2)]
    return [*numbers, *tensors, *many, *batches, *functions, (1, other > 1), (0, torch.tensor([[1, 0]]), other, "sum")]


def writes(name: str) -> bool:
    """Whether some call leaves other values, another shape, other strides or another version behind."""
    for values in TARGETS:
        for form in range(len(forms(torch.tensor(values)))):
            target = torch.tensor(values)
            before, layout = target.clone(), (target.shape, target.stride(), target._version)
            try:
                getattr(target, name)(*forms(target)[form])
            except (RuntimeError, TypeError, ValueError, IndexError, AttributeError, KeyError):
                continue  # not a form of this method
            if (target.shape, target.stride(), target._version) != layout or not torch.equal(target, before):
                return True
    return False


def test_of_dunders_those_write_that_are_called_in_place() -> None:
    assert {name for name in DUNDERS - OF_THE_OBJECT if is_in_place(name)} == {
        name for name in DUNDERS - OF_THE_OBJECT if writes(name)
    }
    assert not any(is_in_place(name) for name in OF_THE_OBJECT)


def test_methods_with_an_underscore_write() -> None:
    flags = {name for name in UNDERSCORED if not is_in_place(name)}
    assert flags == {"requires_grad_", "share_memory_"}
    assert not any(writes(name) for name in flags)
    assert {name for name in UNDERSCORED - flags if not writes(name)} == UNSEEN


def test_what_functions_look_at_is_known_by_their_names() -> None:
    by_place = [
        Tensor.add,
        Tensor.__iadd__,
        Tensor.mul_,
        torch._foreach_addcmul_,
        Tensor.copy_,
        Tensor.float,
        torch.sum,
    ]
    without_values = [Tensor.stride, Tensor.is_contiguous, Tensor.new_zeros, Tensor.size, torch.autograd.grad]
    for func in (*by_place, *without_values):
        assert sensitivity(func) == Sensitivity(), func
    for func in (torch.norm, torch._foreach_norm, Tensor.amax):
        assert sensitivity(func) == Sensitivity(nothing=True), func
    for func in (Tensor.floor_divide_, torch._foreach_div, Tensor.__mod__):
        assert sensitivity(func) == Sensitivity(integers=True), func
    for func in (Tensor.gather, torch.topk, Tensor.__getitem__, Tensor.__matmul__, torch.nn.functional.pad):
        assert sensitivity(func) == Sensitivity(lengths=True, nothing=True, integers=True), func
    assert sensitivity(torch.inverse).values
