"""Calls of every function that torch has, on plain tensors and on sharded ones, and what differs between the two."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.overrides import get_overridable_functions
from torch.utils._pytree import tree_leaves, tree_map

from lightning_effi.sharded_tensors.installation import install

NAMESPACES = (torch, torch.nn.functional, torch.linalg, torch.special, torch.fft)
# Nothing is computed from values: the machinery of objects, storages, devices, seeds, other libraries and processes.
# The eigenvectors of lobpcg have any sign, by rounding. Tensor.index never ends for a plain scalar.
LEFT_OUT = frozenset(
    """
    __class__ __new__ __init__ __init_subclass__ __subclasshook__ __getattribute__ __setattr__ __delattr__ __dir__
    __getstate__ __setstate__ __reduce__ __reduce_ex__ __hash__ __sizeof__ __torch_function__ __torch_dispatch__
    __repr__ __str__ __dlpack__ __dlpack_device__ __deepcopy__ __array_wrap__ share_memory_ is_shared stride dim_order
    module_load cuda xpu mtia ipu hpu pin_memory is_pinned type tensor autocast compile register_hook retain_grad
    register_post_accumulate_grad_hook backward empty_like new_empty new_empty_strided resize resize_as empty
    empty_permuted result_type get_device vmap lobpcg index
    """.split()  # noqa: SIM905
)
PARTS_LEFT_OUT = ("sym_", "sparse", "quantize", "storage", "data_ptr")


def functions() -> dict[str, Callable[..., Any]]:
    """Every function of torch, ``torch.nn.functional`` and ``torch.linalg``, and every method of Tensor."""
    members = get_overridable_functions()
    found = {
        f"{namespace.__name__}.{getattr(function, '__name__', '')}": function
        for namespace in NAMESPACES
        for function in members.get(namespace, [])
    }
    methods = {f"Tensor.{name}": getattr(Tensor, name) for name in dir(Tensor) if callable(getattr(Tensor, name))}
    return {key: function for key, function in (found | methods).items() if not left_out(key.rpartition(".")[2])}


def left_out(name: str) -> bool:
    is_private = name.startswith("_") and not name.startswith("__")
    return name in LEFT_OUT or is_private or any(part in name for part in PARTS_LEFT_OUT)


def forms(target: Tensor) -> list[tuple[Any, ...]]:
    """Further arguments, some of which nearly every function takes; tensors of the target's shape may be sharded."""
    other = (target * 0.5 + 1).to(target.dtype)
    index = torch.zeros(target.shape, dtype=torch.long)
    row = other[0].clone() if target.dim() else other.clone()
    mask = target > 1
    rows: list[tuple[Any, ...]] = []
    if target.dim() == 2:
        rows = [(0, torch.tensor([0]), other[:1].clone()), (other.t().clone(),)]
    return [
        *((other,), (), (0,), (2,), (0.7,), (other, 0.3), (row,), (mask, 2.5), (mask, other), (0, index, other)),
        *((other, other), (0, index), (index,), *rows, (0, 1), (1,), (mask,)),
        *((0, torch.tensor([0, 1])), (0, 0, 2), (-1, True), ((0,),), (1, 0.5), (0.2, 0.6), (2, 0, 1.5)),
        *((other.reshape(-1),), (0, index, other, "sum"), (row, row), (target.shape,)),
    ]


@dataclass
class Findings:
    """What came out: calls that agree, that raise for sharded tensors alone, and that differ, by function."""

    calls: int = 0
    raised: dict[str, str] = field(default_factory=dict)
    differ: dict[str, str] = field(default_factory=dict)


def whole(value: Any) -> Any:
    if isinstance(value, DTensor):
        return value.full_tensor().detach().clone()
    if isinstance(value, Tensor):
        return value.detach().clone()
    return value


def same(ours: Any, theirs: Any) -> bool:
    ours, theirs = tree_leaves(tree_map(whole, ours)), tree_leaves(tree_map(whole, theirs))
    if len(ours) != len(theirs):
        return False
    for one, other in zip(ours, theirs, strict=True):
        if isinstance(one, Tensor) != isinstance(other, Tensor):
            return False
        if isinstance(one, Tensor):
            if one.shape != other.shape or one.dtype != other.dtype:
                return False
            if not torch.allclose(
                one.to(torch.cdouble), other.to(torch.cdouble), rtol=1e-9, atol=1e-12, equal_nan=True
            ):
                return False
        elif type(one) is type(other) and isinstance(one, (int, float, bool, str, complex)) and one != other:
            return one != one and other != other
    return True


def aliases(result: Any, target: Tensor) -> bool:
    return (
        isinstance(result, Tensor)
        and result.numel() > 0
        and result.untyped_storage().data_ptr() == target.untyped_storage().data_ptr()
    )


def call(function: Callable[..., Any], target: Any, form: tuple[Any, ...]) -> tuple[Any, Any, Any]:
    """The result, the target afterwards, and both after a write into the result, where that is one tensor."""
    torch.default_generator.manual_seed(3)  # torch.manual_seed asks every kind of device
    result = function(target, *form)
    if hasattr(result, "__next__"):
        result = list(result)
    first = (whole(tree_map(whole, result)) if not isinstance(result, Tensor) else whole(result), whole(target))
    single = result[0] if isinstance(result, (list, tuple)) and result else result
    if isinstance(single, Tensor) and single.dtype == torch.float64:
        try:
            single.fill_(7.5)
        except RuntimeError:  # expanded memory
            return *first, None
        return *first, (whole(single), whole(target))
    return *first, None


def copied(form: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(value.clone() if isinstance(value, Tensor) else value for value in form)


def compare(target: Tensor, distribute: Callable[[Tensor], Any], names: list[str], count: int) -> Findings:
    """Call the functions of these names in the first ``count`` forms each that work for plain tensors."""
    findings, choices = Findings(), forms(target)
    torch.set_grad_enabled(False)
    warnings.simplefilter("ignore")
    everything = functions()
    for key in names:
        function, used = everything[key], 0
        for index, form in enumerate(choices):
            if used == count:
                break
            try:
                expected = call(function, target.clone(), copied(form))
            except Exception:
                continue  # not a form of this function
            used += 1
            for is_sharded in (False, True):
                sharded = tuple(
                    distribute(v) if is_sharded and isinstance(v, Tensor) and v.shape == target.shape else v
                    for v in copied(form)
                )
                if is_sharded and not any(isinstance(value, DTensor) for value in sharded):
                    continue
                findings.calls += 1
                label = f"{key}#{index}{'s' if is_sharded else ''}"
                try:
                    ours = call(function, distribute(target.clone()), sharded)
                except Exception as error:
                    findings.raised[label] = f"{type(error).__name__}: {error}"[:160]
                    continue
                for what, one, other in zip(("result", "target", "written"), ours, expected, strict=True):
                    refused = what == "written" and one is None  # writing into the result raised an error
                    if not refused and not same(one, other):
                        findings.differ[label] = f"{what} {str(form)[:60]}: {str(one)[:200]} != {str(other)[:200]}"
                        break
    return findings


def targets() -> dict[str, tuple[Tensor, int]]:
    """Tensors, and the dim over which each is sharded: unevenly over two ranks; -1 for a reduction under way."""
    generator = torch.Generator().manual_seed(1)

    def values(*shape: int) -> Tensor:
        return torch.rand(shape, dtype=torch.float64, generator=generator) + 0.2

    return {
        "rows": (values(5, 3), 0),
        "columns": (values(4, 5), 1),
        "square": (values(3, 3), 0),
        "vector": (values(3), 0),
        "short": (values(1, 4), 0),
        "integers": (torch.arange(10).reshape(5, 2), 0),
        "mask": (values(5, 3) > 0.7, 0),
        "pending": (values(3), -1),
        "pending scalar": (values(), -1),
    }


def compare_on_mesh(kinds: list[str], names: list[str], count: int) -> dict[str, Findings]:
    """A job: what differs for targets of these kinds on this rank."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),), mesh_dim_names=("shard",))
    install(mesh)
    findings = {}
    for kind in kinds:
        target, dim = targets()[kind]
        findings[kind] = compare(target, partial(distributed, mesh, dim), names, count)
    return findings


def errors_of_one_part() -> tuple[list[str], list[str]]:
    """A job: what comes of calls that fail on the last rank's part alone, with plain tensors and with sharded ones."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),), mesh_dim_names=("shard",))
    install(mesh)
    torch.set_grad_enabled(False)
    rows, columns = partial(distributed, mesh, 0), partial(distributed, mesh, 1)
    return _outcomes(lambda tensor: tensor, lambda tensor: tensor), _outcomes(rows, columns)


def _outcomes(rows: Callable[[Tensor], Any], columns: Callable[[Tensor], Any]) -> list[str]:
    numbers, divisors = rows(torch.arange(4)), rows(torch.tensor([1, 2, 3, 0]))
    matrices, index = rows(torch.eye(2).expand(4, 2, 2).clone()), rows(torch.tensor([[0], [1], [0], [7]]))
    singular = rows(torch.eye(2).expand(2, 2, 2) * torch.tensor([1.0, 0.0]).view(2, 1, 1))
    uneven = columns(torch.arange(5.0).view(1, 5))
    calls: list[Callable[[], Any]] = [
        lambda: numbers // divisors,
        lambda: numbers.remainder_(divisors),
        lambda: matrices[:, 0].gather(1, index),
        lambda: torch.inverse(singular),
        lambda: torch.nn.functional.pad(uneven, (2, 2), mode="reflect"),
        lambda: uneven.unfold(1, 3, 1),
        lambda: torch.nn.functional.max_pool1d(uneven, 3, 1),
        lambda: uneven.topk(3, 1)[0],
        lambda: uneven.view(5),
        lambda: uneven.mul_(2).add_(1).sum(),
    ]
    return [_outcome(call) for call in calls]


def _outcome(call: Callable[[], Any]) -> str:
    try:
        return str(tree_map(whole, call()))
    except RuntimeError as error:
        return type(error).__name__


def distributed(mesh: Any, dim: int, tensor: Tensor) -> DTensor:
    if dim < 0 and tensor.dtype == torch.bool:  # is no sum
        return DTensor.from_local(tensor, mesh, [Replicate()], run_check=False)
    if dim < 0:
        share = 0.25 if tensor.is_floating_point() else 0  # integers keep their dtype: one rank has them all
        term = tensor * (share if mesh.get_local_rank() else 1 - (mesh.size() - 1) * share)
        return DTensor.from_local(term, mesh, [Partial()], run_check=False)
    parts = list(tensor.chunk(mesh.size(), dim))
    parts += [tensor.narrow(dim, 0, 0)] * (mesh.size() - len(parts))
    mine = parts[mesh.get_local_rank()].contiguous()
    stride = tensor.contiguous().stride()
    return DTensor.from_local(mine, mesh, [Shard(dim)], run_check=False, shape=tensor.shape, stride=stride)
