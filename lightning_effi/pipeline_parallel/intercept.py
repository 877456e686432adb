"""Standing between a step and the blocks it calls.

A stage runs the user's whole ``training_step``, of which it owns a few blocks. Calls of each block and unit, and of its
``forward``, are shadowed on the instance (so that the module tree, its classes and its names stay what they are), and a
handler decides whether a call is real, answered with a stand-in, or the end of this stage's part. A module's hooks
are part of its real calls only. :meth:`Interception.remove` undoes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from lightning_effi.compat import torch as torch_compat
from lightning_effi.pipeline_parallel.kept import KeptTensors
from lightning_effi.pipeline_parallel.stand_ins import MetaTree, StandIns
from lightning_effi.pipeline_parallel.tree import tree_flatten, tree_unflatten

Handler = Callable[[str, tuple[Any, ...], dict[str, Any]], Any]


class StageDone(BaseException):
    """Unwinds a step at the call of the next stage's first block; no ``except Exception`` must stop it."""

    def __init__(self, outputs: list[Tensor]) -> None:
        super().__init__("the end of a pipeline stage")
        self.outputs = outputs


class Interception:
    """The shadowed calls, once :meth:`install` is called, and stand-ins for what does not run.

    Args:
        root: the user's module.
        blocks: names of blocks.
        units: names of the modules with parameters beside them.
    """

    def __init__(self, root: nn.Module, blocks: Sequence[str], units: Sequence[str]) -> None:
        self._modules = {name: root.get_submodule(name) for name in (*blocks, *units)}
        self._real = {name: module.forward for name, module in self._modules.items()}
        self._kept = KeptTensors(self._modules)
        self.stand_ins = StandIns(self._modules)
        self._running: set[str] = set()
        self.elsewhere: frozenset[str] = frozenset()
        """Blocks and units whose parameters this rank does not hold."""
        self._handler: Handler | None = None

    def install(self) -> None:
        """From here on, :meth:`handled_by` has its say."""
        for name, module in self._modules.items():
            module.__dict__["forward"] = partial(self._call, name)
            torch_compat.shadow_call(module, partial(self._call, name))

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Only inside."""
        self.install()
        try:
            yield
        finally:
            self.remove()

    @contextmanager
    def handled_by(self, handler: Handler) -> Iterator[None]:
        """Inside, ``handler(name, args, kwargs)`` answers each call of a block or unit."""
        before, self._handler = self._handler, handler
        try:
            yield
        finally:
            self._handler = before

    def run(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The module itself, with its hooks."""
        self._running.add(name)
        try:
            return torch_compat.call_unshadowed(self._modules[name], *args, **kwargs)
        finally:
            self._running.discard(name)

    def observe(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, list[Any], int]:
        """Run the module and note what stand-ins for its output must look like.

        Returns:
            its output, what it left in its attributes (see :meth:`kept_by`), and its floating-point operations.
        """
        from torch.utils.flop_counter import FlopCounterMode

        before, counter = self._kept.before_call(name), FlopCounterMode(display=False)
        given = MetaTree.of((args, kwargs))
        with counter:
            output = self.run(name, args, kwargs)
        left = self._kept.after_call(name, before)
        self.stand_ins.observe(name, given, (output, left))
        return output, left, counter.get_total_flops()

    def stand_in(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, list[Any]]:
        """For what the module would return, and for what it would leave in attributes, which is put there."""
        output, left = self.stand_ins.make(name, MetaTree.of((args, kwargs)), self._kept.places(name))
        self.keep(name, left)
        return output, left

    def run_keeping(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, list[Any]]:
        """The module's output, and what it leaves in attributes."""
        before = self._kept.before_call(name)
        output = self.run(name, args, kwargs)
        return output, self._kept.left(name, before)

    def keep(self, name: str, left: list[Any]) -> None:
        """Put what a module has left in attributes on another rank into those here."""
        for place, value in zip(self._kept.places(name), left, strict=True):
            self._kept.put(place, value)

    def kept_by(self, name: str) -> list[tuple[str, Any]]:
        """The attributes in which a block or unit leaves tensors, with what stands in them."""
        return [(key, vars(owner).get(key)) for owner, key in self._kept.places(name)]

    def remove(self) -> None:
        """Give every module its own calls back."""
        self._kept.remove()
        for name, module in self._modules.items():
            torch_compat.unshadow_call(module)
            module.__dict__.pop("forward", None)
            if module.forward != self._real[name]:  # it had been replaced on the instance before
                module.__dict__["forward"] = self._real[name]

    def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        if name in self._running:
            return self._real[name](*args, **kwargs)
        if self._handler is not None:
            return self._handler(name, args, kwargs)
        if name in self.elsewhere:
            raise RuntimeError(
                f"'{name}' was called outside of the step hooks, and lives on another pipeline stage. With"
                " pipeline_parallel_size > 1 the module only runs in training_step, validation_step, test_step and"
                " predict_step; in backward, activation checkpointing must be around blocks of one stage, best around"
                " each block by itself"
            )
        args, kwargs = resolved((args, kwargs))
        return self.run(name, args, kwargs)


def bind(placeholder: Tensor, value: Tensor) -> None:
    """Let ``value`` take the place of ``placeholder`` wherever that is an argument of a block.

    Noted on the placeholder itself, since activation checkpointing calls the block again in backward with it.
    """
    placeholder._effi_value = value  # type: ignore[attr-defined]


def resolved(tree: Any) -> Any:
    """``tree`` with the values of placeholders that have one."""
    leaves, spec = tree_flatten(tree)
    return tree_unflatten([getattr(leaf, "_effi_value", leaf) for leaf in leaves], spec)
