"""What code of a stage finds in the place of values that other stages compute.

They have the shapes and dtypes of the real ones and values that the whole module has computed in its observed run, so
that argument checks, guards and control flow do as they did there. Nothing may depend on them: :mod:`.origins` sees to
that.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_effi.compat import torch as torch_compat
from lightning_effi.modules.user_code import here
from lightning_effi.pipeline_parallel.kept import Place
from lightning_effi.pipeline_parallel.tree import Spec, tree_flatten, tree_unflatten


@dataclass(frozen=True)
class TensorMeta:
    """Shape, dtype and device of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> TensorMeta:
        return cls(tuple(tensor.shape), tensor.dtype, tensor.device)

    @property
    def bytes(self) -> int:
        count = self.dtype.itemsize
        for size in self.shape:
            count *= size
        return count

    def fits(self, tensor: Tensor) -> bool:
        return tuple(tensor.shape) == self.shape and tensor.dtype == self.dtype


@dataclass(frozen=True)
class MetaTree:
    """A tree whose tensors are only known by what :class:`TensorMeta` tells."""

    leaves: tuple[Any, ...]
    spec: Spec

    @classmethod
    def of(cls, tree: Any) -> MetaTree:
        leaves, spec = tree_flatten(tree)
        return cls(tuple(TensorMeta.of(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves), spec)

    @property
    def signature(self) -> Any:
        """What decides about the shapes of an output: structure, shapes and dtypes, plain values."""
        plain = (TensorMeta, bool, int, float, str, type(None))
        return str(self.spec), tuple(leaf if isinstance(leaf, plain) else type(leaf) for leaf in self.leaves)

    def filled(self, fill: Callable[[TensorMeta], Tensor]) -> Any:
        """The tree with tensors by ``fill``."""
        return tree_unflatten([fill(leaf) if isinstance(leaf, TensorMeta) else leaf for leaf in self.leaves], self.spec)


class StandIns:
    """Stand-ins for what blocks and units return and leave in attributes.

    Args:
        modules: whose outputs are meant, by name, whole.

    Attributes:
        perturbed: whether the values differ from the observed ones, so that a comparison notices whoever uses them.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._kinds = {name: type(module) for name, module in modules.items()}
        self._fake = {name: _FakeRun(module) for name, module in modules.items()}
        self._observed: dict[str, tuple[MetaTree, MetaTree]] = {}
        self._known: dict[Any, MetaTree] = {}
        self._samples: dict[Any, Tensor] = {}
        self.perturbed = False

    def observe(self, name: str, given: MetaTree, made: Any) -> None:
        """Note what a module made of ``given``, and values for stand-ins: one for all of a class and shape."""
        metas = MetaTree.of(made)
        self._observed[name] = given, metas
        self._known[self._key(name, given)] = metas
        for index, leaf in enumerate(tree_flatten(made)[0]):
            if isinstance(leaf, Tensor):
                kind = (self._kinds[name], index, tuple(leaf.shape), leaf.dtype)
                if kind not in self._samples:
                    self._samples[kind] = leaf.detach().clone()
                self._samples[name, index] = self._samples[kind]

    def make(self, name: str, given: MetaTree, kept: Sequence[Place]) -> Any:
        """A stand-in for what the module would make of ``given``: its output, and what it leaves in ``kept``."""
        key = self._key(name, given)
        if key not in self._known:
            self._known[key] = self._shapes(name, given, kept)
        metas = self._known[key]
        leaves = [
            self._filled(name, index, leaf) if isinstance(leaf, TensorMeta) else leaf
            for index, leaf in enumerate(metas.leaves)
        ]
        return tree_unflatten(leaves, metas.spec)

    def _key(self, name: str, given: MetaTree) -> Any:
        return name, given.signature, torch_compat.autocast_dtype()

    def _shapes(self, name: str, given: MetaTree, kept: Sequence[Place]) -> MetaTree:
        """Of an output for arguments of other shapes than the observed ones.

        Raises:
            RuntimeError: where neither a run without values nor the observed shapes tell.
        """
        made = self._fake[name].run(given, kept)
        if made is None:
            made = self._scaled(name, given)
        if made is None:
            raise RuntimeError(
                f"pipeline: the shapes of what '{name}' returns depend on values that only its stage knows, and differ"
                f" from those of the first batch{here()}. Use batches of one shape, or pipeline_parallel_size=1"
            )
        return made

    def _scaled(self, name: str, given: MetaTree) -> MetaTree | None:
        """Kernels and control flow that need values cannot run without: sizes that have changed in the arguments are
        taken to have changed in the output.
        """
        observed, metas = self._observed[name]
        if str(observed.spec) != str(given.spec):
            return None
        sizes: dict[int, int] = {}
        for old, new in zip(observed.leaves, given.leaves, strict=True):
            if isinstance(old, TensorMeta) and isinstance(new, TensorMeta):
                if len(old.shape) != len(new.shape):
                    return None
                for before, after in zip(old.shape, new.shape, strict=True):
                    if sizes.setdefault(before, after) != after:
                        return None

        def scaled(leaf: Any) -> Any:
            if not isinstance(leaf, TensorMeta):
                return leaf
            return TensorMeta(tuple(sizes.get(size, size) for size in leaf.shape), leaf.dtype, leaf.device)

        return MetaTree(tuple(map(scaled, metas.leaves)), metas.spec)

    def _filled(self, name: str, index: int, meta: TensorMeta) -> Tensor:
        sample = self._samples.get((name, index))
        if sample is None:
            value = torch.zeros(meta.shape, dtype=meta.dtype, device=meta.device)
        else:
            value = _cycled(sample, meta.shape).to(meta.dtype)
            value = value.clone() if value.data_ptr() == sample.data_ptr() else value
        if not (meta.dtype.is_floating_point or meta.dtype.is_complex):
            return value
        if self.perturbed:
            value = value * 1.25 if value.numel() == 1 else value.flatten().roll(1).view(meta.shape) * 1.05
        if not torch.is_grad_enabled():
            return value
        leaf = leaf_like(value)
        leaf._effi_stands_for = name  # type: ignore[attr-defined]
        return Enter.apply(leaf, value)  # type: ignore[no-any-return]


class _FakeRun:
    """Output shapes of a module, found by running a copy of it without memory on fake tensors."""

    def __init__(self, module: nn.Module) -> None:
        self._mode = torch_compat.fake_tensor_mode()
        self._paths = {id(child): path for path, child in module.named_modules()}
        try:
            self._clone: nn.Module | None = self._make_clone(module)
        except (RuntimeError, TypeError):  # it keeps something that cannot be copied
            self._clone = None

    def run(self, given: MetaTree, kept: Iterable[Place]) -> MetaTree | None:
        """Of ``(output, values of attributes)``; ``None`` where the copy cannot run without values."""
        if self._clone is None:
            return None

        with self._mode:
            args, kwargs = given.filled(lambda meta: torch.empty(meta.shape, dtype=meta.dtype, device=meta.device))
        places = [(self._clone.get_submodule(self._paths[id(owner)]), key) for owner, key in kept]
        for owner, key in places:
            if isinstance(grown := vars(owner).get(key), list):
                grown.clear()
        try:
            with torch.random.fork_rng(devices=[]), self._mode, torch.no_grad():
                output = self._clone(*args, **kwargs)
        except Exception:
            # Experts that are chosen by computed values, and kernels without a shape rule: torch raises all kinds of
            # errors, and the caller has another way or an error of its own.
            return None
        return MetaTree.of((output, [vars(owner).get(key) for owner, key in places]))

    def _make_clone(self, module: nn.Module) -> nn.Module:
        memo: dict[int, Any] = {}
        with self._mode:
            for parameter in module.parameters():
                memo[id(parameter)] = nn.Parameter(_without_memory(parameter), parameter.requires_grad)
            for buffer in module.buffers():
                memo[id(buffer)] = _without_memory(buffer)
        return copy.deepcopy(module, memo)


def _without_memory(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def _cycled(sample: Tensor, shape: tuple[int, ...]) -> Tensor:
    """``sample`` cut and repeated to ``shape``."""
    if tuple(sample.shape) == shape:
        return sample
    if sample.dim() != len(shape) or not sample.numel():
        count = torch.Size(shape).numel()
        flat = sample.flatten() if sample.numel() else sample.new_zeros(1)
        return flat[torch.arange(count, device=sample.device) % len(flat)].view(shape)
    for dim, size in enumerate(shape):
        if size != sample.shape[dim]:
            sample = sample.index_select(dim, torch.arange(size, device=sample.device) % sample.shape[dim])
    return sample


def stands_behind(tensors: Iterable[Tensor]) -> str | None:
    """The name of a module whose stand-in takes part in what autograd knows of ``tensors``."""
    stack = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    seen = set(stack)
    while stack:
        node = stack.pop()
        name = getattr(getattr(node, "variable", None), "_effi_stands_for", None)
        if name is not None:
            return str(name)
        for child, _ in node.next_functions:
            if child is not None and child not in seen:
                seen.add(child)
                stack.append(child)
    return None


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
