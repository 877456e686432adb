"""Equal starting values on all data-parallel ranks, block by block.

Ranks that were not seeded alike would otherwise start from different weights and never notice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_effi import _compat


def materialize(module: nn.Module, device: torch.device) -> None:
    """Make values for what is still on ``meta`` below ``module``, by each owner's own ``reset_parameters``.

    Values that are there already (loaded weights, buffers) are left alone.

    Raises:
        TypeError: where an owner cannot make values; names it.
    """
    for name, submodule in module.named_modules():
        parameters = {key: p for key, p in submodule._parameters.items() if p is not None}
        buffers = {key: b for key, b in submodule._buffers.items() if b is not None}
        missing = [key for key, tensor in {**parameters, **buffers}.items() if tensor.is_meta]
        if not missing:
            continue
        reset = getattr(submodule, "reset_parameters", None)
        if not callable(reset) or len(missing) < len(parameters):
            raise TypeError(
                f"'{name or type(module).__name__}' ({type(submodule).__name__}) was built without values"
                f" (init_module(empty_init=True)) and cannot make them with reset_parameters(): {', '.join(missing)}."
                " Load a checkpoint with ckpt_path=..., or build the module without empty_init"
            )
        submodule.to_empty(device=device, recurse=False)
        reset()


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Inside, parameters of new modules are put on ``meta`` as they are registered; buffers keep their values.

    ``torch.device("meta")`` would lose buffers outside the state dict (rotary tables, masks) for good. Registration
    is the one place where every parameter passes, so ``nn.Module.register_parameter`` is wrapped meanwhile.
    """
    original = nn.Module.register_parameter

    def register_parameter(self: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        original(self, name, parameter)
        if parameter is not None and not parameter.is_meta:
            self._parameters[name] = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)

    nn.Module.register_parameter = register_parameter  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = original  # type: ignore[method-assign]


def broadcast_states(tensors: Iterable[Tensor], group: Any) -> None:
    """Overwrite ``tensors`` with the values of the first rank of ``group``; a tensor given twice is sent once."""
    unique = {id(tensor): tensor.detach() for tensor in tensors}
    # the coalesced broadcast flattens, so a bucket must not mix dtypes
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in unique.values():
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    for tensors_of_dtype in by_dtype.values():
        _compat.broadcast_module_states(tensors_of_dtype, group)
