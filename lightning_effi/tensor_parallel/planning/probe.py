"""A block in parts against the same block whole: output, gradients of its inputs and of all its parameters."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from lightning_effi.comm.agreement import Agreement
from lightning_effi.modules.restore import NoDropout, copied, same_randomness
from lightning_effi.tensor_parallel.layers.apply import AppliedPlan
from lightning_effi.tensor_parallel.layers.outside import mixes
from lightning_effi.tensor_parallel.planning.plan import LayerPlan, SequencePlan
from lightning_effi.tensor_parallel.rules import on_gather
from lightning_effi.tensor_parallel.split import CannotSplitError, gathered, split_tensors
from lightning_effi.verify.compare import compare_tensors

TOLERANCE = 1e-4  # fp32 rounding of one block is below 1e-5; a gradient that lacks a sum is off by far more


@dataclass(frozen=True)
class Verdict:
    """Attributes:
    passed: whether all ranks found the block equal.
    reason: what went wrong.
    sources: the column-wise layers that caused it, where that is known.
    gathers: functions without a rule, for which whole activations were gathered.
    gathers_sequence: likewise, where the activations were parts of a sequence.
    hands_out: whether the block returns activations of split layers (attention weights by heads) as parts.
    """

    passed: bool
    reason: str = ""
    sources: frozenset[str] = frozenset()
    gathers: tuple[str, ...] = ()
    gathers_sequence: tuple[str, ...] = ()
    hands_out: bool = False


class BlockProbe:
    """Compares splittings of one block on one set of inputs.

    Args:
        block: intact; it is copied, in fp32 unless it is more precise.
        args: what it was called with.
        kwargs: likewise.
        mesh: the ``tp`` axis.
        control_group: its ranks, with a backend for CPU tensors.
    """

    def __init__(
        self, block: nn.Module, args: Sequence[Any], kwargs: dict[str, Any], mesh: Any, control_group: Any
    ) -> None:
        self._block = _precise(copied(block))
        self._arguments = _precise_tree((tuple(args), kwargs))
        self._device_type = next(block.parameters()).device.type
        self._mesh = mesh
        self._agreement = Agreement(control_group)
        self._hands_out = False
        self._expected = self._run(copied(self._block))  # a run may change buffers

    def judge(self, layers: Sequence[LayerPlan], sequence_dim: int | None = None) -> Verdict:
        """Try a splitting; the same verdict on all ranks.

        Args:
            layers: what is split.
            sequence_dim: the dim of the hidden states that is split between these layers.
        """
        parallel = copied(self._block)
        AppliedPlan(parallel, layers, self._mesh, () if sequence_dim is None else (SequencePlan("", sequence_dim),))
        names = {id(p): layer.name for layer in layers for p in parallel.get_submodule(layer.name).parameters()}
        gathers: dict[str, None] = {}
        gathers_sequence: dict[str, None] = {}

        def note(name: str, sources: frozenset[str]) -> None:
            (gathers if sources or sequence_dim is None else gathers_sequence)[name] = None

        try:
            with on_gather(note), _NoOtherUse(names):
                actual = self._run(parallel)
        except CannotSplitError as error:  # follows from shapes alone, so that all ranks see it at the same place
            return Verdict(False, str(error), error.sources)
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            return Verdict(False, f"{type(error).__name__}: {str(error).splitlines()[0][:200]}")
        comparison = compare_tensors(actual, self._expected)
        if self._agreement.any([not comparison.within(TOLERANCE)])[0]:
            name, distance = comparison.worst
            return Verdict(False, f"'{name}' is off by {distance:.1e}", gathers=tuple(gathers))
        return Verdict(
            True, gathers=tuple(gathers), gathers_sequence=tuple(gathers_sequence), hands_out=self._hands_out
        )

    def _run(self, block: nn.Module) -> dict[str, Tensor]:
        no_autocast = torch.autocast(self._device_type, enabled=False)
        with torch.enable_grad(), NoDropout(), no_autocast, same_randomness(block):
            return self._run_precisely(block)

    def _run_precisely(self, block: nn.Module) -> dict[str, Tensor]:
        args, kwargs = copy.deepcopy(self._arguments)
        inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t.is_floating_point()]
        for tensor in inputs:
            tensor.requires_grad_()
        returned = block(*args, **kwargs)
        self._hands_out = any(tensor.placement.sources for tensor in split_tensors(returned))
        output = gathered(returned)
        results = [t for t in tree_leaves(output) if isinstance(t, Tensor) and t.requires_grad]
        generator = torch.Generator().manual_seed(0)
        pulls = [torch.randn(t.shape, generator=generator).to(t) for t in results]
        torch.autograd.backward(results, pulls)
        found = {f"output {index}": t.detach() for index, t in enumerate(results)}
        found |= {f"gradient of input {i}": t.grad for i, t in enumerate(inputs) if t.grad is not None}
        for name, parameter in block.named_parameters():
            if (gradient := parameter.grad) is not None:
                full = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
                found[f"gradient of {name}"] = full.detach()
        return found


class _NoOtherUse(TorchFunctionMode):
    """Inside, a split weight that meets whole tensors is an error that names its layer, by the ids in ``names``."""

    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__()
        self._names = names

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if mixes(getattr(func, "__name__", ""), args, kwargs):
            used = {self._names[id(leaf)] for leaf in tree_leaves((args, kwargs)) if id(leaf) in self._names}
            raise CannotSplitError("its weight is used otherwise than in a product with its input", frozenset(used))
        return func(*args, **kwargs)


def _precise(block: nn.Module) -> nn.Module:
    low = [t for t in block.parameters() if t.is_floating_point() and t.dtype.itemsize < 4]
    return block.float() if low else block


def _precise_tree(tree: Any) -> Any:
    """Copies that are no inference tensors and require no gradient."""

    def precise(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        low = leaf.is_floating_point() and leaf.dtype.itemsize < 4
        return leaf.detach().to(torch.float32 if low else leaf.dtype).clone()

    return tree_map(precise, tree)
