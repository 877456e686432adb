"""Sequence parallelism: between its column- and row-wise layers a block works on a part of the sequence.

Norms, dropouts and residual additions treat every position alike, so each rank of a group does them for its own
positions (Korthikanti et al., arXiv:2205.05198). Hidden states become split tensors where they enter a block; a
column-wise layer assembles them, a row-wise one gives each rank its positions of the sum. What such tensors meet in
between follows the rules of :mod:`lightning_effi.tensor_parallel.rules`: a norm's weight is shared, so that its
gradient is that of all positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from lightning_effi.compat import torch as torch_compat
from lightning_effi.tensor_parallel.collectives import TensorGroup, reduce, scatter_sum, take
from lightning_effi.tensor_parallel.planning.plan import SequencePlan
from lightning_effi.tensor_parallel.split import Split, SplitTensor, gathered, wrap


@dataclass(frozen=True)
class _Region:
    """The block that is running: which dim of ``[rows, positions, width]`` is split, and its size in the whole."""

    dim: int
    length: int


class SequenceShards:
    """Hooks on blocks, and on the row-wise layers inside them; harmless where no block is planned for it.

    Blocks hand split tensors to each other. Recomputation in backward gets a block's arguments from autograd, which
    returns plain tensors with this rank's values; their placement is put back here.
    """

    def __init__(self, group: TensorGroup) -> None:
        self._group = group
        self._region: _Region | None = None
        self._arrivals = _Arrivals()

    def __deepcopy__(self, memo: Any) -> SequenceShards:
        return SequenceShards(self._group)

    @property
    def is_active(self) -> bool:
        """Whether a block is running whose hidden states are split by sequence."""
        return self._region is not None

    def begin_step(self) -> None:
        """Nothing will be recomputed any more."""
        self._arrivals = _Arrivals()

    def apply(self, root: nn.Module, plans: Sequence[SequencePlan]) -> list[Any]:
        """Register the hooks of blocks; their handles."""
        handles = []
        for plan in plans:
            block = root.get_submodule(plan.name)
            handles.append(block.register_forward_pre_hook(partial(self._enter, plan), with_kwargs=True))
            # also when a recomputation ends early, by an exception
            handles.append(block.register_forward_hook(partial(self._leave, plan), always_call=True))
        return handles

    def _enter(self, plan: SequencePlan, _block: nn.Module, args: Any, kwargs: Any) -> Any:
        leaves, spec = tree_flatten((args, kwargs))
        index = hidden_states(leaves)
        if index is None:
            return None
        hidden = leaves[index]
        arriving = hidden.placement if isinstance(hidden, SplitTensor) else None
        if torch_compat.in_backward() and arriving is None:
            arriving = self._arrivals.recall(plan.name, hidden)
        else:
            self._arrivals.remember(plan.name, hidden, arriving)
        if arriving is None:
            arriving = Split(self._group, plan.dim, (hidden.shape[plan.dim],))
            hidden = take(hidden, plan.dim, arriving.pieces, self._group)
        if not isinstance(hidden, SplitTensor):
            hidden = wrap(hidden, arriving)
        leaves[index] = hidden
        assert arriving.dim is not None
        self._region = _Region(arriving.dim, arriving.size)
        return tree_unflatten(leaves, spec)

    def _leave(self, plan: SequencePlan, _block: nn.Module, _args: Any, output: Any) -> Any:
        self._region = None
        # a block that is an attention itself still returns a summand, which is added up next
        return gathered(output, where=lambda split: not split.partial) if plan.gathers else output

    def sum_up(self, _layer: nn.Module, _args: Any, output: Any) -> Any:
        """Post-hook of a row-wise layer: this rank's positions of the sum."""
        return tree_map(self._summed, output)

    def _summed(self, leaf: Any) -> Any:
        if not isinstance(leaf, SplitTensor) or not leaf.placement.partial:
            return leaf
        summand, region = leaf.as_subclass(Tensor), self._region
        if region is None or summand.dim() <= region.dim or summand.shape[region.dim] != region.length:
            return reduce(summand, self._group)
        pieces = (region.length,)
        return wrap(scatter_sum(summand, region.dim, pieces, self._group), Split(self._group, region.dim, pieces))


class _Arrivals:
    """How hidden states of which shape came to which block since the last backward: the memory of recomputation."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, torch.Size], set[Split | None]] = {}
        self._recalled = False

    def remember(self, block: str, hidden: Tensor, arriving: Split | None) -> None:
        if self._recalled:
            self._seen.clear()
            self._recalled = False
        if torch.is_grad_enabled():
            self._seen.setdefault((block, _local_shape(hidden)), set()).add(arriving)

    def recall(self, block: str, hidden: Tensor) -> Split | None:
        self._recalled = True
        seen = self._seen.get((block, _local_shape(hidden)), {None})
        if len(seen) > 1:
            raise RuntimeError(
                f"'{block}' is recomputed in backward and was called with sequences of several lengths, of which this"
                " rank holds equally many positions. Use TensorParallel(sequence_parallel=False), or sequences of one"
                " length"
            )
        [split] = seen
        return split


def _local_shape(tensor: Tensor) -> torch.Size:
    return tensor.as_subclass(Tensor).shape


def hidden_states(leaves: Sequence[Any]) -> int | None:
    """Which of a block's arguments its hidden states are: the first floating tensor of at least three dims."""
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dim() >= 3:
            return index
    return None
