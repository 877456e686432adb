"""Standing between a step and the blocks it calls.

A stage runs the user's whole ``training_step``, of which it owns a few blocks. Calls of each block and unit, and of its
``forward``, are shadowed on the instance (so that the module tree, its classes and its names stay what they are), and a
handler decides whether a call is real, answered with placeholders, or the end of this stage's part. A module's hooks
are part of its real calls only. :meth:`Interception.remove` undoes it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_effi.compat import torch as torch_compat
from lightning_effi.pipeline_parallel.kept import KeptTensors
from lightning_effi.pipeline_parallel.tree import Spec, tree_flatten, tree_leaves, tree_map, tree_unflatten

Handler = Callable[[str, tuple[Any, ...], dict[str, Any]], Any]


class StageDone(BaseException):
    """Unwinds a step at the call of the next stage's first block; no ``except Exception`` must stop it."""

    def __init__(self, outputs: list[Tensor]) -> None:
        super().__init__("the end of a pipeline stage")
        self.outputs = outputs


@dataclass(frozen=True)
class TensorMeta:
    """Shape and dtype of a tensor, and whether gradients flow through it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool = False

    @classmethod
    def of(cls, tensor: Tensor) -> TensorMeta:
        return cls(tuple(tensor.shape), tensor.dtype, tensor.device, tensor.requires_grad)

    @property
    def bytes(self) -> int:
        count = self.dtype.itemsize
        for size in self.shape:
            count *= size
        return count


class Interception:
    """The shadowed calls, and the output shapes of what does not run.

    Args:
        root: the user's module.
        blocks: names of blocks.
        units: names of the modules with parameters beside them.
        kept: what a run of the whole module left in attributes of blocks and units.
    """

    def __init__(
        self, root: nn.Module, blocks: Sequence[str], units: Sequence[str], kept: KeptTensors | None = None
    ) -> None:
        self._modules = {name: root.get_submodule(name) for name in (*blocks, *units)}
        self._real = {name: module.forward for name, module in self._modules.items()}
        self.kept = kept or KeptTensors({})
        self._outputs = {
            name: FakeOutputs(module, first_tensor if name in blocks else None, self.kept.left_by(name))
            for name, module in self._modules.items()
        }
        self._running: set[str] = set()
        self.elsewhere: frozenset[str] = frozenset()
        """Blocks and units whose parameters this rank does not hold."""
        self._handler: Handler | None = None
        for name, module in self._modules.items():
            module.__dict__["forward"] = partial(self._call, name)
            torch_compat.shadow_call(module, partial(self._call, name))

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

    def flops(self, name: str) -> int:
        """Floating-point operations of one forward, for the last shapes that :meth:`placeholders` saw."""
        return self._outputs[name].flops

    def placeholders(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], fill: float) -> Any:
        """What the module would return, with ``fill`` for every floating-point value and zeros for others.

        The same is put into the attributes in which it would leave tensors.
        """
        output, kept = self._outputs[name].filled(args, kwargs, fill)
        for place, value in kept.items():
            self.kept.put(place, value)
        return output

    def kept_by(self, name: str) -> list[tuple[str, Any]]:
        """What stands in the attributes in which a block or unit leaves tensors, with their names."""
        return [(key, vars(owner).get(key)) for owner, key in self.kept.places.get(name, ())]

    def computed_by(self, value: Any) -> str | None:
        """The block or unit inside of which a tensor without values was computed that should not have left it."""
        return next((name for name, outputs in self._outputs.items() if outputs.made(value)), None)

    def remove(self) -> None:
        """Give every module its own calls back."""
        self.kept.remove()
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


@dataclass(frozen=True)
class MetaTree:
    """A tree whose tensors are only known by what :class:`TensorMeta` tells."""

    leaves: tuple[Any, ...]
    spec: Spec

    @classmethod
    def of(cls, tree: Any) -> MetaTree:
        leaves, spec = tree_flatten(tree)
        return cls(tuple(TensorMeta.of(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves), spec)

    def filled(self, fill: float) -> Any:
        """With tensors of these shapes, full of ``fill``."""
        return tree_unflatten([_filled(leaf, fill) for leaf in self.leaves], self.spec)


class FakeOutputs:
    """Output shapes of a module, found by running a copy of it without memory on fake tensors.

    Args:
        module: whose outputs are meant.
        stand_in: what to take for the output where the copy cannot run.
        kept: what it leaves in attributes.
    """

    def __init__(
        self, module: nn.Module, stand_in: Callable[[Any, Any], Any] | None, kept: Mapping[tuple[nn.Module, str], Any]
    ) -> None:
        self._mode = torch_compat.fake_tensor_mode()
        self._clone = self._make_clone(module)
        self._known: dict[Any, tuple[MetaTree, dict[Any, MetaTree]]] = {}
        self._stand_in = stand_in
        paths = {id(child): path for path, child in module.named_modules()}
        self._kept = {(owner, key): (paths[id(owner)], MetaTree.of(value)) for (owner, key), value in kept.items()}
        self.flops = 0

    def filled(self, args: tuple[Any, ...], kwargs: dict[str, Any], fill: float) -> tuple[Any, dict[Any, Any]]:
        """The output, and what stands in attributes."""
        key = (signature((args, kwargs)), torch.is_grad_enabled(), _autocast_dtype())
        if key not in self._known:
            self._known[key] = self._run(args, kwargs)
        output, kept = self._known[key]
        return output.filled(fill), {place: value.filled(fill) for place, value in kept.items()}

    def made(self, value: Any) -> bool:
        """Whether this is a tensor without values of :meth:`filled`."""
        return torch_compat.fake_mode_of(value) is self._mode

    def _run(self, args: Any, kwargs: Any) -> tuple[MetaTree, dict[Any, MetaTree]]:
        from torch.utils.flop_counter import FlopCounterMode

        def fake(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            return self._mode.from_tensor(value.detach()).requires_grad_(value.requires_grad)

        fake_args, fake_kwargs = tree_map(fake, (args, kwargs))
        counter = FlopCounterMode(display=False)
        kept = {place: metas for place, (_, metas) in self._kept.items()}
        try:
            with torch.random.fork_rng(devices=[]), self._mode, counter:
                output = self._clone(*fake_args, **fake_kwargs)
            for place, (path, _) in self._kept.items():
                kept[place] = MetaTree.of(vars(self._clone.get_submodule(path)).get(place[1]))
        except Exception:
            # Experts that are chosen by computed values, and kernels without a shape rule, cannot run without values.
            # A residual block returns what its first argument looks like; where it does not, the check of what is
            # really sent fails by name.
            output = None if self._stand_in is None else self._stand_in(fake_args, fake_kwargs)
            if output is None:
                raise
        self.flops = counter.get_total_flops()
        return MetaTree.of(output), kept

    def _make_clone(self, module: nn.Module) -> nn.Module:
        memo: dict[int, Any] = {}
        with self._mode:
            for parameter in module.parameters():
                empty = torch.empty_strided(
                    parameter.shape, parameter.stride(), dtype=parameter.dtype, device=parameter.device
                )
                memo[id(parameter)] = nn.Parameter(empty, parameter.requires_grad)
            for buffer in module.buffers():
                memo[id(buffer)] = torch.empty_strided(
                    buffer.shape, buffer.stride(), dtype=buffer.dtype, device=buffer.device
                )
        return copy.deepcopy(module, memo)


def first_tensor(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """What a residual block works on."""
    return next((leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)), None)


def signature(tree: Any) -> Any:
    """What decides output shapes: the tree's structure, its tensors' shapes and dtypes, its plain values."""
    leaves, spec = tree_flatten(tree)
    described = tuple(
        TensorMeta.of(leaf)
        if isinstance(leaf, Tensor)
        else leaf
        if isinstance(leaf, (bool, int, float, str, type(None)))
        else type(leaf)
        for leaf in leaves
    )
    return str(spec), described


def bind(placeholder: Tensor, value: Tensor) -> None:
    """Let ``value`` take the place of ``placeholder`` wherever that is an argument of a block.

    Noted on the placeholder itself, since activation checkpointing calls the block again in backward with it.
    """
    placeholder._effi_value = value  # type: ignore[attr-defined]


def resolved(tree: Any) -> Any:
    """``tree`` with the values of placeholders that have one."""
    leaves, spec = tree_flatten(tree)
    return tree_unflatten([getattr(leaf, "_effi_value", leaf) for leaf in leaves], spec)


def _filled(value: Any, fill: float) -> Any:
    if not isinstance(value, TensorMeta):
        return value
    if not (value.dtype.is_floating_point or value.dtype.is_complex):
        return torch.zeros(value.shape, dtype=value.dtype, device=value.device)
    tensor = torch.full(value.shape, fill, dtype=value.dtype, device=value.device)
    return Enter.apply(leaf_like(tensor), tensor) if torch.is_grad_enabled() else tensor


def leaf_like(tensor: Tensor) -> Tensor:
    """Where the gradient of a tensor from elsewhere arrives; takes no memory itself."""
    return tensor.new_empty(()).expand(tensor.shape).requires_grad_()


class Enter(torch.autograd.Function):
    """A tensor from elsewhere becomes part of the graph, not as a leaf or its view, on which no code could work in
    place.
    """

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, received: Tensor) -> Tensor:
        ctx.mark_dirty(received)
        return received

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient, None


def _autocast_dtype() -> torch.dtype | None:
    for device in ("cpu", "cuda"):
        if torch.is_autocast_enabled(device):
            return torch.get_autocast_dtype(device)
    return None
