"""What a training step changes besides gradients: cut into pieces it would change that once a piece."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_effi.compat import dtensor as dtensor_compat
from lightning_effi.modules.restore import same_randomness
from lightning_effi.modules.snapshot import data_of


class _ParameterWrites(TorchDispatchMode):
    """Notes operators that write into a parameter, also through ``.data``, which version counters do not see.

    Args:
        watched: plain parameters, or this rank's parts of sharded ones, by name.
        saves: whether to keep what they were before the first of these operators.

    Attributes:
        names: of the parameters that were written to.
        saved: for each of them, its memory and a copy of what it was.
    """

    def __init__(self, watched: Iterable[tuple[str, Tensor]], saves: bool = False) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.saved: list[tuple[Tensor, Tensor]] = []
        self._saves = saves
        self._watched = {p.untyped_storage().data_ptr(): (name, p.detach()) for name, p in watched if p.numel()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for position, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            for tensor in tree_leaves(value):
                if isinstance(tensor, Tensor) and tensor.layout is torch.strided:
                    self._note(dtensor_compat.local_tensor(tensor).untyped_storage().data_ptr())
        return func(*args, **kwargs)

    def _note(self, memory: int) -> None:
        name, tensor = self._watched.get(memory, (None, None))
        if name is not None and tensor is not None and name not in self.names:
            self.names.add(name)
            if self._saves:
                self.saved.append((tensor, tensor.clone()))


@contextmanager
def undone_writes(module: nn.Module) -> Iterator[None]:
    """Inside runs a step that will run again: what it writes into parameters (a teacher's average, say) is undone.

    Only what is written to is kept twice.
    """
    parameters = [(p, name, dtensor_compat.local_tensor(p).detach()) for name, p in module.named_parameters()]
    writes = _ParameterWrites(((name, memory) for _, name, memory in parameters), saves=True)
    try:
        with writes:
            yield
    finally:
        for parameter, _, memory in parameters:
            if dtensor_compat.local_tensor(parameter).data_ptr() != memory.data_ptr():  # parameter.data = ...
                is_plain = dtensor_compat.local_tensor(parameter) is parameter
                parameter.data = memory if is_plain else dtensor_compat.wrap_local(memory, parameter)  # type: ignore[arg-type]
        for memory, before in writes.saved:
            memory.copy_(before)


def changed_by(
    module: nn.Module, step: Callable[[], Any], agree: Callable[[bool], bool] = lambda again: again
) -> list[str]:
    """Names of parameters, buffers and attributes that keep changing when ``step`` runs again on the same data.

    A value that a second run leaves as the first one did (a loss kept on ``self``, a table made on first use) is not
    counted, and neither are torchmetrics metrics: updating them piece by piece is updating them with the batch. Where
    the first run changes nothing, there is no second. The caller restores the module.

    Args:
        module: whose state is meant.
        step: what is run, once or twice.
        agree: whether any of the ranks that run the step together runs it again.
    """
    plain = [(name, p) for name, p in module.named_parameters() if dtensor_compat.local_tensor(p) is p]
    writes, start = _ParameterWrites(plain), _state(module)
    with same_randomness(module), writes:
        step()
    before = _state(module)
    changed = [name for name, value in before.items() if not _same(value, start.get(name))]
    if not agree(bool(changed)):
        return sorted(writes.names)
    with same_randomness(module):
        step()
    after = _state(module)
    return sorted(writes.names) + [name for name, value in after.items() if not _same(value, before.get(name))]


def _state(module: nn.Module) -> dict[str, Any]:
    state: dict[str, Any] = {}
    for name, submodule in module.named_modules():
        if _is_metric(submodule):
            continue
        prefix = f"{name}." if name else ""
        state.update({f"{prefix}{key}": b.detach().clone() for key, b in submodule._buffers.items() if b is not None})
        state.update({f"{prefix}{key}": copy.deepcopy(value) for key, value in data_of(submodule)})
    return state


def _is_metric(module: nn.Module) -> bool:
    return any(
        kind.__name__ == "Metric" and kind.__module__.startswith("torchmetrics") for kind in type(module).__mro__
    )


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return isinstance(a, Tensor) and isinstance(b, Tensor) and a.shape == b.shape and _equal(a, b)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    return type(a) is type(b) and (a == b or a != a)


def _equal(a: Tensor, b: Tensor) -> bool:
    if a.dtype != b.dtype:
        return False
    return torch.allclose(a, b, rtol=0.0, atol=0.0, equal_nan=True) if a.is_floating_point() else torch.equal(a, b)
