"""Modules whose parameters get their values only when they are sharded (``Trainer.init_module(empty_init=True)``).

Values come from a checkpoint, or from the ``reset_parameters`` of the modules that own the parameters, in the order in
which construction would have called them, so that the same seed gives the same bits. What construction did to
parameters outside ``reset_parameters`` cannot be repeated, and is refused instead of being lost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

# Attributes that a deferred parameter carries: the module that made it, and how often construction wrote into it.
_OWNER, _WRITES = "effi_owner", "effi_writes"


class _CountWrites(TorchDispatchMode):
    """Counts in-place operations on meta tensors by storage; ``_version`` would miss those through ``.data``."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[int] = Counter()

    def of(self, tensor: Tensor) -> int:
        return self.counts[tensor.untyped_storage()._cdata]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for argument, value in zip(func._schema.arguments, args, strict=False):
            written = argument.alias_info is not None and argument.alias_info.is_write
            if written and isinstance(value, Tensor) and value.is_meta:
                self.counts[value.untyped_storage()._cdata] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Inside, parameters of new modules are put on ``meta`` as they are registered; everything else keeps its values.

    ``torch.device("meta")`` would lose buffers outside the state dict (rotary tables, masks) for good. Registration is
    the one place where every parameter passes, so ``nn.Module.register_parameter`` is wrapped meanwhile. A module
    without ``reset_parameters`` (a bare parameter for a class token, say) keeps the values it was built with.
    """
    original = nn.Module.register_parameter
    made: list[nn.Parameter] = []

    def register_parameter(self: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        original(self, name, parameter)
        if parameter is not None and not parameter.is_meta and _reset_of(self) is not None:
            deferred = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
            setattr(deferred, _OWNER, id(self))
            made.append(deferred)
            self._parameters[name] = deferred

    nn.Module.register_parameter = register_parameter  # type: ignore[method-assign, assignment]
    try:
        with _CountWrites() as writes:
            yield
    finally:
        nn.Module.register_parameter = original  # type: ignore[method-assign]
    for parameter in made:
        setattr(parameter, _WRITES, writes.of(parameter))


class DeferredValues:
    """Gives the parameters below ``root`` that are still on ``meta`` their values, on the CPU.

    Nothing happens to a module that has its values already.
    """

    def __init__(self, root: nn.Module) -> None:
        self._names = {module: name or type(root).__name__ for name, module in root.named_modules()}
        self._order = list(_children_first(root))
        self._position = 0
        self._deferred: dict[nn.Module, dict[str, nn.Parameter]] = {}
        self._holders: dict[int, list[tuple[nn.Module, str]]] = {}  # every place of a deferred parameter
        for module in self._order:
            for key, parameter in module._parameters.items():
                if parameter is not None and parameter.is_meta:
                    self._deferred.setdefault(module, {})[key] = parameter
                    self._holders.setdefault(id(parameter), []).append((module, key))

    def fill_through(self, unit: nn.Module) -> None:
        """Fill everything that construction makes before ``unit``, and ``unit`` itself.

        Raises:
            TypeError: where values cannot be made; names the module.
        """
        end = self._order.index(unit) + 1
        for module in self._order[self._position : end]:
            self._fill(module)
        self._position = max(self._position, end)

    def _fill(self, module: nn.Module) -> None:
        deferred = self._deferred.get(module, {})
        lost = [key for key, buffer in module._buffers.items() if buffer is not None and buffer.is_meta]
        if not deferred and not lost:
            return
        reset = _reset_of(module)
        if reset is None or lost:
            self._refuse(module, [*deferred, *lost], "which reset_parameters() does not make")
        present = {key: module._parameters[key] for key in deferred}
        self._check_nothing_is_lost(module, deferred, reset)
        for key, parameter in deferred.items():
            module._parameters[key] = nn.Parameter(torch.empty_like(parameter, device="cpu"), parameter.requires_grad)
        reset()
        for key, parameter in deferred.items():
            filled = module._parameters[key]
            if getattr(parameter, _OWNER, id(module)) == id(module):
                for holder, name in self._holders[id(parameter)]:
                    holder._parameters[name] = filled
            else:  # tied: construction drew a value here too, and then threw it away for the owner's
                module._parameters[key] = present[key]

    def _check_nothing_is_lost(
        self, module: nn.Module, deferred: dict[str, nn.Parameter], reset: Callable[[], None]
    ) -> None:
        """Construction must not have written more into the parameters than ``reset_parameters`` does."""
        module._parameters.update(deferred)
        with _CountWrites() as writes, torch.random.fork_rng(devices=[]):
            reset()
        own = {key: p for key, p in deferred.items() if getattr(p, _OWNER, None) == id(module)}
        changed = [key for key, parameter in own.items() if getattr(parameter, _WRITES) != writes.of(parameter)]
        if changed:
            self._refuse(module, changed, "which code outside reset_parameters() initialised")

    def _refuse(self, module: nn.Module, keys: list[str], why: str) -> NoReturn:
        raise TypeError(
            f"'{self._names[module]}' ({type(module).__name__}) was built with init_module(empty_init=True) and has no"
            f" values for {', '.join(keys)}, {why}. Load a checkpoint with ckpt_path=..., or build the module without"
            " empty_init"
        )


def _reset_of(module: nn.Module) -> Callable[[], None] | None:
    """The method by which a module draws the initial values of its own parameters."""
    for name in ("reset_parameters", "_reset_parameters"):
        if callable(reset := getattr(type(module), name, None)):
            return reset.__get__(module)
    return None


def _children_first(module: nn.Module, seen: set[int] | None = None) -> Iterator[nn.Module]:
    """Construction makes a module's children before its own ``reset_parameters`` runs, at the end of ``__init__``."""
    seen = set() if seen is None else seen
    if id(module) in seen:
        return
    seen.add(id(module))
    for child in module.children():
        yield from _children_first(child, seen)
    yield module
