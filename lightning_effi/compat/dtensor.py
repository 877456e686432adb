"""Private names of DTensor, each behind a function of our own."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_effi.compat.torch import has_functions_of_its_own, without_subclass_dispatch

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor


def quiet_sequential_gathers() -> Callable[[], None]:
    """Drop torch's advice against gathering a tensor that is sharded over two axes of a mesh; returns how to undo it.

    FSDP2 makes such tensors of tensor-parallel ones, and checkpoints gather them; there is nothing that a user could
    change about it.
    """
    logger = logging.getLogger("torch.distributed.tensor._redistribute")
    only_others = _NoSequentialGathers()
    logger.addFilter(only_others)
    return partial(logger.removeFilter, only_others)


class _NoSequentialGathers:
    def filter(self, record: logging.LogRecord) -> bool:
        return "sequential all_gather operations" not in record.getMessage()


def read_scalars_globally() -> None:
    """Let reading a sharded scalar (``.item()``, ``float()``, an f-string ...) give its global value on every rank.

    The norm of a sharded gradient is a partial result; torch 2.13-2.14 silently reads this rank's part of it, and
    refuses to format it or to hand it to NumPy. What is set here is process-wide and changes nothing for plain tensors;
    like every use of a sharded value, reading one is something that all ranks must do.
    """
    from torch.distributed.tensor import DTensor

    def read(operator: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
        return operator(args[0].full_tensor())

    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    handlers[torch.ops.aten._local_scalar_dense.default] = read

    def reads_whole(name: str) -> Callable[..., Any]:
        return lambda self, *args, **kwargs: getattr(self.full_tensor(), name)(*args, **kwargs)

    for name in ("__format__", "numpy", "tolist"):
        setattr(DTensor, name, reads_whole(name))


def log_scalars_globally() -> None:
    """Let ``self.log`` keep the global value of a sharded scalar instead of the scalar itself.

    Progress bars read logged values on the first rank alone; of a partial result that read would be a collective that
    the other ranks do not enter, and the run would hang. Process-wide, and without effect on plain tensors.
    """
    from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultMetric
    from torch.distributed.tensor import DTensor

    original = _ResultMetric.update
    if hasattr(original, "reads_dtensors"):
        return

    def update(self: Any, value: Any, batch_size: int) -> None:
        original(self, value.full_tensor() if isinstance(value, DTensor) else value, batch_size)

    update.reads_dtensors = True  # type: ignore[attr-defined]
    _ResultMetric.update = update  # type: ignore[method-assign]


def functions_of_dtensors(run: Callable[..., Any]) -> None:
    """Let ``run(func, args, kwargs)`` carry out every torch function that is given a DTensor.

    DTensors take part in torch functions as plain tensors do (``_disabled_torch_function_impl``) until their operators
    are dispatched, where it is too late to know a view from a copy. Process-wide; inside ``run`` it is as before.
    """
    from torch.distributed.tensor import DTensor

    def __torch_function__(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(not issubclass(kind, DTensor) and has_functions_of_its_own(kind) for kind in types):
            return NotImplemented  # other subclasses know what to do with DTensors
        with without_subclass_dispatch():
            return run(func, args, kwargs or {})

    DTensor.__torch_function__ = classmethod(__torch_function__)  # type: ignore[assignment]


def rebind_local(tensor: Tensor, local: Tensor) -> None:
    """Let a DTensor have other memory for this rank's part (``DTensor._local_tensor``)."""
    tensor._local_tensor = local.detach()  # type: ignore[attr-defined]


def take_over(tensor: Tensor, value: Tensor) -> None:
    """Let a DTensor be what ``value`` is, memory and placements (``DTensor._local_tensor`` and ``_spec``)."""
    tensor._local_tensor, tensor._spec = value._local_tensor, value._spec  # type: ignore[attr-defined]


def reduced(tensor: Any) -> DTensor:
    """A DTensor without reductions under way; autograd records it."""
    from torch.distributed.tensor import Replicate

    placements = [Replicate() if placement.is_partial() else placement for placement in tensor.placements]
    return tensor.redistribute(placements=placements)  # type: ignore[no-any-return]


def from_local(local: Tensor, mesh: DeviceMesh, placements: Any) -> DTensor:
    """A DTensor around this rank's part; no communication."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(local, mesh, placements, run_check=False)


def replicated(value: Tensor, mesh: DeviceMesh) -> DTensor:
    """A DTensor around a tensor that all ranks have alike; no communication."""
    from torch.distributed.tensor import Replicate

    return from_local(value, mesh, [Replicate()] * mesh.ndim)


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
