"""Which module makes finite values infinite or NaN, in forward or in backward.

A module is to blame where what comes out is not finite although what went in is: behind it everything is infected. The
checks stay on the device as 0-dim tensors until :meth:`NonfiniteWatch.findings` reads them all at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._pytree import tree_leaves

from lightning_effi.compat import torch as torch_compat

Pass = Literal["forward", "backward"]
THE_LOSS = "the loss"


@dataclass(frozen=True)
class Finding:
    """A module, by name, and the pass in which it made values that are not finite; ``rank`` saw it."""

    module: str
    pass_: Pass
    rank: int = 0

    def __str__(self) -> str:
        what = "returned values" if self.pass_ == "forward" else "made a gradient"
        plural = "are" if self.pass_ == "forward" else "is"
        return f"'{self.module}' (rank {self.rank}) {what} that {plural} not finite, from finite ones"


@dataclass
class _Call:
    """One call of a module. ``flags``: by place (input, output, their gradients), whether values are finite."""

    name: str
    flags: dict[str, list[Tensor]] = field(default_factory=dict)
    returned_at: int = 0  # when backward came to the gradient of an input

    def note(self, place: str, finite: Tensor) -> None:
        self.flags.setdefault(place, []).append(finite)

    def is_finite(self, place: str) -> bool:
        return all(bool(flag) for flag in self.flags.get(place, ()))


class NonfiniteWatch:
    """Looks at what goes into and comes out of modules, and at the gradients of both.

    The hook is one for all modules of the process, since pipelines refuse modules that have hooks of their own.

    Args:
        root: whose modules are watched, by their names in it.
        is_watched: asked once for each name when watching starts.
    """

    def __init__(self, root: nn.Module, is_watched: Callable[[str], bool]) -> None:
        self._names = {id(module): name for name, module in root.named_modules() if name and is_watched(name)}
        self._calls: list[_Call] = []
        self._losses: list[Tensor] = []
        self._clock = 0
        self._handle: Any = None

    def start(self) -> None:
        """Begin, or go on, to watch."""
        if self._handle is None:
            self._handle = register_module_forward_hook(self._look)

    def stop(self) -> None:
        """Forget everything that was seen and leave the modules alone."""
        if self._handle is not None:
            self._handle.remove()
        self._handle = None
        self._calls.clear()
        self._losses.clear()

    def findings(self) -> list[Finding]:
        """Who is to blame on this rank: at most one module of each pass, the first and innermost one."""
        found: list[Finding] = []
        for call in self._calls:
            if call.is_finite("input") and not call.is_finite("output"):
                found.append(Finding(call.name, "forward"))
                break
        guilty = [
            call
            for call in self._calls
            if call.is_finite("gradient of output") and not call.is_finite("gradient of input")
        ]
        if guilty:
            # of modules around each other, whose inputs are one tensor, the innermost is named
            first = min(guilty, key=lambda call: (call.returned_at, -call.name.count(".")))
            found.append(Finding(first.name, "backward"))
        return found

    def suspicions(self) -> list[Finding]:
        """Where no module is to blame: whether it was the loss."""
        if not all(bool(flag) for flag in self._losses):
            return [Finding(THE_LOSS, "forward")]
        if not all(call.is_finite("gradient of output") for call in self._calls):
            return [Finding(THE_LOSS, "backward")]
        return []

    # -- while the step runs -----------------------------------------------------------------------------------------

    def note_loss(self, loss: Tensor) -> None:
        """What ``training_step`` returned."""
        self._losses.append(_finite(loss.detach()))

    def _look(self, module: nn.Module, args: Any, output: Any) -> None:
        name = self._names.get(id(module))
        if name is None:
            return
        call = _Call(name)
        self._calls.append(call)
        for tensor in _floating(args):
            # masks hold -inf on purpose; they are no activations
            call.note("input", _finite(tensor) if tensor.requires_grad else _no_nan(tensor))
            self._follow(tensor, call, "gradient of input")
        for tensor in _floating(output):
            call.note("output", _finite(tensor))
            self._follow(tensor, call, "gradient of output")

    def _follow(self, tensor: Tensor, call: _Call, place: str) -> None:
        if not (tensor.requires_grad and torch.is_grad_enabled()):
            return

        def look(gradient: Tensor) -> None:
            self._clock += 1
            if place == "gradient of input" and not call.returned_at:
                call.returned_at = self._clock
            call.note(place, _finite(gradient))

        tensor.register_hook(look)


def _floating(tree: Any) -> Iterable[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def _finite(tensor: Tensor) -> Tensor:
    with torch.no_grad(), torch_compat.without_subclass_dispatch():
        return torch.isfinite(tensor).all()


def _no_nan(tensor: Tensor) -> Tensor:
    with torch.no_grad(), torch_compat.without_subclass_dispatch():
        return ~torch.isnan(tensor).any()
