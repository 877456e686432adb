"""Between a sharded tensor and the whole of it: gathering, keeping this rank's part, finishing reductions.

A reduction over a sharded dim gives DTensor a *pending* result: every rank holds a summand, and the sum is made when it
is needed. Values of this kind never reach a module's own code: :func:`settle` makes them whole as soon as they appear.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from lightning_effi.compat import dtensor as dtensor_compat

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def is_sharded_tensor(value: Any) -> bool:
    """Whether this is a DTensor, replicated ones included."""
    from torch.distributed.tensor import DTensor

    return isinstance(value, DTensor)


def whole(value: Any) -> Any:
    """A pytree with whole plain tensors in the place of sharded ones."""
    from torch.distributed.tensor import DTensor

    return tree_map_only(DTensor, lambda tensor: tensor.full_tensor(), value)


def make_attributes_whole(module: nn.Module) -> None:
    """Give a module whole plain tensors for the sharded ones that it holds beside its parameters.

    Pruning computes a mask and the masked weight from a shard, and forward goes on with them and full parameters.
    """
    holders: tuple[dict[str, Any], ...] = (module._buffers, vars(module))
    for holder in holders:
        for name, value in holder.items():
            if is_sharded_tensor(value):
                holder[name] = whole(value.detach())


def complete(value: Any) -> Any:
    """As :func:`whole`, for functions that autograd records; gradients are complete on every rank."""
    from torch.distributed.tensor import DTensor, Replicate

    def full(tensor: Any) -> Tensor:
        return tensor.full_tensor(grad_placements=[Replicate()] * tensor.device_mesh.ndim)  # type: ignore[no-any-return]

    return tree_map_only(DTensor, full, value)


# -- reductions under way --------------------------------------------------------------------------------------------


def is_pending(value: Any) -> bool:
    """Whether ranks hold summands of this tensor (or terms of another reduction) instead of its values."""
    return is_sharded_tensor(value) and any(placement.is_partial() for placement in value.placements)


def settle(tensors: Iterable[Any]) -> None:
    """Finish the reductions of those that are pending, in place; scalars of one kind in one message."""
    from torch.distributed.tensor import DTensor

    scalars: dict[Any, list[Any]] = {}
    for tensor in {id(tensor): tensor for tensor in tensors if is_pending(tensor)}.values():
        if tensor.dim():
            dtensor_compat.take_over(tensor, reduced(tensor))
        else:
            scalars.setdefault((tensor.device_mesh, tensor.placements, tensor.dtype), []).append(tensor)
    for (mesh, placements, _), alike in scalars.items():
        terms = torch.stack([dtensor_compat.local_tensor(tensor) for tensor in alike])
        totals = DTensor.from_local(terms, mesh, placements, run_check=False).full_tensor()
        for tensor, total in zip(alike, totals, strict=True):
            dtensor_compat.take_over(tensor, replicated(total.clone(), mesh))


def settled(result: Any) -> Any:
    """What a torch function has returned, without pending reductions; autograd goes on recording."""
    leaves = result if isinstance(result, (tuple, list)) else (result,)
    if not any(is_pending(leaf) for leaf in leaves):
        return result
    if not any(leaf.requires_grad for leaf in leaves if is_pending(leaf)):
        with torch.no_grad():
            settle(leaves)
        return result
    return tree_map_only(Tensor, lambda leaf: reduced(leaf) if is_pending(leaf) else leaf, result)


def reduced(tensor: Any) -> Any:
    """A sharded tensor without reductions under way; autograd records it."""
    from torch.distributed.tensor import Replicate

    placements = [Replicate() if placement.is_partial() else placement for placement in tensor.placements]
    return tensor.redistribute(placements=placements)


def replicated(value: Tensor, mesh: DeviceMesh) -> Any:
    """A DTensor around a tensor that all ranks have alike; no communication."""
    from torch.distributed.tensor import DTensor, Replicate

    return DTensor.from_local(value, mesh, [Replicate()] * mesh.ndim, run_check=False)


def is_uneven(value: Any) -> bool:
    """Whether ranks hold parts of different lengths of this sharded tensor; all answer alike, without a message."""
    return is_sharded_tensor(value) and len(set(_sizes_of_parts(value))) > 1


def leaves_ranks_empty(value: Any) -> bool:
    """Whether some rank holds nothing of this sharded tensor; all answer alike, without a message."""
    return is_sharded_tensor(value) and 0 in _sizes_of_parts(value)


def _sizes_of_parts(tensor: Any) -> tuple[int, int]:
    """How many values the largest part of ``tensor`` has, and the smallest."""
    longest, shortest = list(tensor.shape), list(tensor.shape)
    for axis, placement in enumerate(tensor.placements):
        if dtensor_compat.is_sharded(placement):
            dim, count = placement.dim, tensor.device_mesh.size(axis)
            longest[dim] = -(-longest[dim] // count)
            shortest[dim] = max(shortest[dim] - (count - 1) * -(-shortest[dim] // count), 0)
    return math.prod(longest), math.prod(shortest)


# -- this rank's part ------------------------------------------------------------------------------------------------


def replace(tensor: Any, full: Tensor) -> None:
    """Let ``tensor`` have the values of ``full``."""
    with torch.no_grad():
        dtensor_compat.local_tensor(tensor).copy_(part(agreed(full, tensor), tensor))


def agreed(full: Tensor, like: Any) -> Tensor:
    """Where ranks hold copies, the copies must not part: what the first of them drew counts."""
    for dim, placement in enumerate(like.placements):
        group = like.device_mesh.get_group(dim)
        if not dtensor_compat.is_sharded(placement) and dist.get_world_size(group) > 1:
            full = full.contiguous()  # into an expanded one gloo would write beyond its memory
            dist.broadcast(full, dist.get_global_rank(group, 0), group)
    return full


def part(full: Tensor, like: Any) -> Tensor:
    """This rank's part of ``full``, which is to be laid out as ``like`` is."""
    coordinate = like.device_mesh.get_coordinate()
    axes = [axis for axis, placement in enumerate(like.placements) if dtensor_compat.is_sharded(placement)]
    for axis in sorted(axes, key=lambda axis: not like.placements[axis].is_shard()):  # strided ones cut what is left
        dim, count = like.placements[axis].dim, like.device_mesh.size(axis)
        size = -(-full.shape[dim] // count)
        start = min(coordinate[axis] * size, full.shape[dim])
        full = full.narrow(dim, start, min(size, full.shape[dim] - start))
    return full


def distributed(full: Any, like: Any) -> Any:
    """``full`` laid out as ``like`` is, if it has its shape; else as it is."""
    if not is_sharded_tensor(like) or type(full) is not Tensor or full.shape != like.shape:
        return full
    return dtensor_compat.wrap_local(part(agreed(full, like), like).contiguous(), like)
