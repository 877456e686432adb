"""What DTensor learns for a run, and forgets when the last run has ended.

All of it is process-wide by nature, and acts on DTensors of running strategies' meshes alone: those of other programs
in the same process are what torch made them, before, during and after a run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lightning_effi.compat import dtensor as dtensor_compat
from lightning_effi.modules.undo import Undo
from lightning_effi.sharded_tensors.collectives import collective
from lightning_effi.sharded_tensors.functions import run, write_values
from lightning_effi.sharded_tensors.names import asks_no_values
from lightning_effi.sharded_tensors.wholes import is_sharded_tensor, whole

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# Told apart before the general way through nested arguments, since this is asked of every function of a step.
_WITHOUT_TENSORS = (type(None), bool, int, float, str, torch.dtype, torch.device, torch.Size)
_running: list[DeviceMesh] = []
_undo = Undo()


def install(mesh: DeviceMesh) -> Callable[[], None]:
    """From now on, module code may use DTensors of ``mesh`` and of its parts as if they were plain tensors.

    Returns:
        a function that takes this back; the first call counts.
    """
    root = dtensor_compat.root_of(mesh)
    if not _running:
        _undo.push(dtensor_compat.functions_of_dtensors(_function), "DTensor.__torch_function__")
        read = dtensor_compat.operators_of_dtensors(_read, [torch.ops.aten._local_scalar_dense.default])
        _undo.push(read, "how DTensor's dispatcher reads a scalar")
        collectives = dtensor_compat.operators_of_dtensors(_collective, dtensor_compat.collective_operators())
        _undo.push(collectives, "how DTensor's dispatcher carries out collectives")
        _undo.push(dtensor_compat.logged_values_through(_logged), "update of Lightning's _ResultMetric")
        _undo.push(
            dtensor_compat.quiet_sequential_gathers(), "a filter on the logger torch.distributed.tensor._redistribute"
        )
    _running.append(root)
    pending = [root]

    def uninstall() -> None:
        while pending:
            _running.remove(pending.pop())
            if not _running:
                _undo.run()

    return uninstall


def is_ours(*values: Any) -> bool:
    """Whether there are DTensors of a running strategy among these arguments."""
    return any(_is_ours(value) for value in values)


def _is_ours(value: Any) -> bool:
    if isinstance(value, Tensor):
        # meshes are compared by value: DTensor caches layouts, and hands out a mesh of an earlier run that is equal
        mesh = value.device_mesh if is_sharded_tensor(value) else None  # type: ignore[attr-defined]
        return mesh is not None and dtensor_compat.root_of(mesh) in _running
    if type(value) in (tuple, list):
        return any(_is_ours(item) for item in value)
    if type(value) in _WITHOUT_TENSORS:
        return False
    leaves = tree_leaves(value)
    return not any(leaf is value for leaf in leaves) and any(_is_ours(leaf) for leaf in leaves)


def _function(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    if asks_no_values(func) or not is_ours(args, kwargs):
        return func(*args, **kwargs)
    return run(func, args, kwargs)


def _read(operator: Any, args: Any, kwargs: Any) -> Any:
    """A scalar, whichever way it is read, has its value on every rank; torch would give this rank's summand."""
    return operator(whole(args[0])) if is_ours(args) else operator(*args, **kwargs)


def _collective(operator: Any, args: Any, kwargs: Any) -> Any:
    if not is_ours(args, kwargs):
        return operator(*args, **kwargs)
    return collective(write_values, operator, args, kwargs)


def _logged(value: Any) -> Any:
    return whole(value) if isinstance(value, Tensor) and is_ours(value) else value
