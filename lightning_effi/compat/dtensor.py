"""Private names of DTensor, each behind a function of our own."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import debug

from lightning_effi.compat.torch import has_functions_of_its_own, without_subclass_dispatch

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor


def root_of(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh that ``mesh`` is a part of (``DeviceMesh._get_root_mesh``); itself where it is no part of another."""
    return mesh._get_root_mesh()


# -- what is installed for a run; each function returns one that takes it back ---------------------------------------


def quiet_sequential_gathers() -> Callable[[], None]:
    """Drop torch's advice against gathering a tensor that is sharded over two axes of a mesh.

    FSDP2 makes such tensors of tensor-parallel ones, and checkpoints gather them; there is nothing that a user could
    change about it.
    """
    logger, quiet = logging.getLogger("torch.distributed.tensor._redistribute"), _SequentialGathers()
    logger.addFilter(quiet)
    return lambda: logger.removeFilter(quiet)


class _SequentialGathers:
    def filter(self, record: Any) -> bool:
        return "sequential all_gather operations" not in record.getMessage()


def logged_values_through(convert: Callable[[Any], Any]) -> Callable[[], None]:
    """Let ``self.log`` keep ``convert(value)`` (``_ResultMetric.update``).

    Progress bars read logged values on the first rank alone; a sharded one would have to be read by all.
    """
    from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultMetric

    original = _ResultMetric.update

    def update(self: Any, value: Any, batch_size: int) -> None:
        original(self, convert(value), batch_size)

    _ResultMetric.update = update  # type: ignore[method-assign]
    return partial(setattr, _ResultMetric, "update", original)


def functions_of_dtensors(run: Callable[..., Any]) -> Callable[[], None]:
    """Let ``run(func, args, kwargs)`` carry out every torch function that is given a DTensor.

    DTensors take part in torch functions as plain tensors do (``_disabled_torch_function_impl``) until their operators
    are dispatched, where it is too late to know a view from a copy. Inside ``run`` it is as before.
    """
    from torch.distributed.tensor import DTensor

    def __torch_function__(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(not issubclass(kind, DTensor) and has_functions_of_its_own(kind) for kind in types):
            return NotImplemented  # other subclasses know what to do with DTensors
        with without_subclass_dispatch():
            return run(func, args, kwargs or {})

    stock = vars(DTensor)["__torch_function__"]
    DTensor.__torch_function__ = classmethod(__torch_function__)  # type: ignore[assignment]
    return partial(setattr, DTensor, "__torch_function__", stock)


def operators_of_dtensors(run: Callable[..., Any], operators: Iterable[Any]) -> Callable[[], None]:
    """Let ``run(operator, args, kwargs)`` carry out these operators on DTensors (``OpDispatcher._custom_op_handlers``).

    Inside ``run`` it is as before.
    """
    from torch.distributed.tensor import DTensor

    table: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers

    def handler(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with _without(table, operator):
            return run(operator, args, kwargs)

    ours = dict.fromkeys(operators, handler)
    assert not ours.keys() & table.keys()
    table.update(ours)

    def undo() -> None:
        for operator in ours:
            del table[operator]

    return undo


@contextmanager
def _without(table: dict[Any, Any], key: Any) -> Iterator[None]:
    value = table.pop(key)
    try:
        yield
    finally:
        table[key] = value


def forget_meshes() -> None:
    """Empty the tables of what operators return, which outlive process groups.

    Meshes of the same ranks are equal, so an operator would hand out the mesh that it was first called with, whose
    groups may have been destroyed since.
    """
    debug._clear_sharding_prop_cache()


def collective_operators() -> list[Any]:
    """The operators of all collectives of ``torch.distributed``."""
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("c10d::")]
    return [getattr(torch.ops.c10d, name.removeprefix("c10d::")).default for name in names]


# -- parts of a DTensor ----------------------------------------------------------------------------------------------


def rebind_local(tensor: Tensor, local: Tensor) -> None:
    """Let a DTensor have other memory for this rank's part (``DTensor._local_tensor``)."""
    tensor._local_tensor = local.detach()  # type: ignore[attr-defined]


def take_over(tensor: Tensor, value: Tensor) -> None:
    """Let a DTensor be what ``value`` is, memory and placements (``DTensor._local_tensor`` and ``_spec``)."""
    tensor._local_tensor, tensor._spec = value._local_tensor, value._spec  # type: ignore[attr-defined]


def is_sharded(placement: Any) -> bool:
    """Whether ranks along this axis hold different parts of a DTensor.

    FSDP2 over a dim that tensor parallelism has cut already gives ``_StridedShard``, of which ``is_shard()`` is false.
    """
    from torch.distributed.tensor.placement_types import _StridedShard

    return bool(placement.is_shard()) or isinstance(placement, _StridedShard)


def local_tensor(tensor: Tensor) -> Tensor:
    """The part of a DTensor on this rank, without autograd (``DTensor._local_tensor``); a plain tensor as it is."""
    return getattr(tensor, "_local_tensor", tensor)


def wrap_local(local: Tensor, like: DTensor) -> DTensor:
    """A DTensor around ``local`` with the mesh, placements and global shape of ``like``; no communication."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
