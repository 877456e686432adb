"""Gradient reduction in one order on all ranks, whatever part of the module each of them ran.

FSDP2 reduces a group when autograd has finished with it. Ranks that ran different parts (a branch that depends on the
batch, a layer that was dropped) then issue their reductions in different orders, and the sums mix gradients of
different parameters. Here a group only becomes *ready* when autograd has finished with it; ready groups are reduced in
an agreed order, as DistributedDataParallel does with its buckets, and parameters without gradient count as zeros.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from lightning_effi.comm.agreement import Agreement
from lightning_effi.compat import dtensor as dtensor_compat
from lightning_effi.compat import torch as torch_compat
from lightning_effi.data_parallel.buffers import BufferSync
from lightning_effi.data_parallel.group import LiveGroup


class OrderedReduction:
    """Reduces ``groups``, and the ``replicated`` parameters, which FSDP2 cannot shard, over the ranks.

    Args:
        groups: in forward order; the first guess of the order in which backward finishes is its reverse.
        replicated: parameters of which every rank holds a full copy.
        group: process group over which replicated parameters are averaged.
        agreement: the ranks that must agree.
        buffers: told along with the agreement, so that a change on any rank is sent at the next forward.
    """

    def __init__(
        self,
        groups: Sequence[LiveGroup],
        replicated: dict[str, nn.Parameter],
        group: dist.ProcessGroup,
        agreement: Agreement,
        buffers: BufferSync,
    ) -> None:
        self._order = list(reversed(groups))
        self._replicated = replicated
        self._group_name = group.group_name
        self._agreement = agreement
        self._buffers = buffers
        self._ready: set[LiveGroup] = set()
        self._finished_in: list[LiveGroup] | None = []  # the order that the first backward shows; None once adopted
        self._next = 0
        self._used: set[str] = set()
        self.changed_buffers: frozenset[str] = frozenset()
        self.has_direct_gradients = False  # whether shards may have gradients that did not come through a reduction
        for live in groups:
            live.on_post_backward(self._on_post_backward)

    # -- during backward ---------------------------------------------------------------------------------------------

    def _on_post_backward(self, group: LiveGroup) -> None:
        self._note_usage(group)
        if not group.reduces:
            group.keep_unreduced()
            return
        if group.is_awaited or group in self._ready:
            return  # its module ran more than once; what comes after the reduction is reduced when backward has ended
        self._ready.add(group)
        if self._finished_in is not None:
            self._finished_in.append(group)
        while self._next < len(self._order) and self._order[self._next] in self._ready:
            self._next += 1
            self._order[self._next - 1].reduce()

    def _note_usage(self, group: LiveGroup) -> None:
        self._used.update(name for name, used in zip(group.parameter_names, group.with_gradient(), strict=True) if used)

    # -- after backward ----------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Reduce what backward left: groups it did not touch, gradients that came late, replicated parameters."""
        for group in self._order[self._next :]:
            self._note_usage(group)
            group.reduce()
        self._next = len(self._order)
        self.reduce_leftovers()
        self._reduce_replicated()
        for group in self._order:
            group.finish()
            group.settle()
        self._adopt_order()
        self._ready.clear()
        self._next = 0

    def reduce_leftovers(self) -> None:
        """Reduce gradients that are still unreduced on any rank: of modules that ran twice, of weights used outside
        their module's forward, of a window whose last step returned no loss.
        """
        late = [any(group.with_gradient()) for group in self._order]
        buffers = self._buffers.changed()
        flags = self._agreement.any([*late, *buffers.values()])
        self.changed_buffers = frozenset(n for n, changed in zip(buffers, flags[len(late) :], strict=True) if changed)
        for group, is_late in zip(self._order, flags, strict=False):
            if is_late:
                self._note_usage(group)
                group.reduce()
                group.finish()

    def _reduce_replicated(self) -> None:
        trainable = {name: p for name, p in self._replicated.items() if p.requires_grad}
        self._used.update(name for name, p in trainable.items() if p.grad is not None)
        if not trainable:
            return
        for parameter in trainable.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        # A gradient that was averaged before and has grown since may be averaged as a whole: the mean is linear.
        flat = torch.cat([p.grad.double().flatten() for p in trainable.values()])  # type: ignore[union-attr]
        process_group = torch_compat.group_named(self._group_name)
        dist.all_reduce(flat, group=process_group)
        flat /= dist.get_world_size(process_group)
        for parameter, mean in zip(
            trainable.values(), flat.split([p.numel() for p in trainable.values()]), strict=True
        ):
            parameter.grad.copy_(mean.view_as(parameter))  # type: ignore[union-attr]

    def _adopt_order(self) -> None:
        """After the first backward, reduce in the order in which it finished on the first rank."""
        if self._finished_in is None:
            return
        seen = [group.name for group in self._finished_in]
        first_rank = self._agreement.gather(seen)[0]
        self._order.sort(key=lambda group: first_rank.index(group.name) if group.name in first_rank else len(seen))
        self._finished_in = None

    # -- before the optimizer's step ---------------------------------------------------------------------------------

    def close_window(self, fingerprint: int) -> bool:
        """Reduce what is left of an accumulation window and drop gradients of parameters that no rank used.

        A parameter whose gradient is only the zeros that made up for its absence must have none, as in a single
        process, or weight decay would move it.

        Returns:
            Whether all ranks passed the same ``fingerprint``.
        """
        parameters = self._named_parameters()
        unreduced = any(any(group.with_gradient()) for group in self._order)
        used_here = [self._is_used(name, parameter) for name, parameter in parameters]
        flags, same = self._agreement.any_and_same([*used_here, unreduced], fingerprint)
        if flags[-1]:
            self.finish()
            return self.close_window(fingerprint) and same
        for (_, parameter), used in zip(parameters, flags, strict=False):
            if not used:
                parameter.grad = None
        return same

    def _is_used(self, name: str, parameter: nn.Parameter) -> bool:
        if name in self._used:
            return True
        gradient = parameter.grad
        return self.has_direct_gradients and gradient is not None and bool(dtensor_compat.local_tensor(gradient).any())

    def discard(self, parameters: set[int]) -> None:
        """``zero_grad`` for the parameters with these ``id``s: also forget gradients that were not reduced yet."""
        for group in self._order:
            group.drop_unreduced(parameters)
        self._used.difference_update(name for name, p in self._named_parameters() if id(p) in parameters)

    def _named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        sharded = [pair for group in self._order for pair in zip(group.parameter_names, group.parameters, strict=True)]
        return [*sharded, *self._replicated.items()]
