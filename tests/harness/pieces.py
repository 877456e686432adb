"""Tensors of which each rank holds a piece, put together again outside of the processes that trained.

Not ``DTensor.full_tensor``: that costs one collective a tensor, takes one copy of what is held several times without
looking at the others, and is part of what is being tested.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


@dataclass(frozen=True)
class Piece:
    """Part of a tensor, held by one rank.

    Attributes:
        values: The part.
        offset: Where in the whole it begins, one index a dim.
        shape: Shape of the whole.
    """

    values: Tensor
    offset: tuple[int, ...]
    shape: tuple[int, ...]


def piece_of(tensor: Tensor) -> Piece:
    """What this rank holds of ``tensor``, copied."""
    with torch._C.DisableTorchFunction():  # what a run lets DTensor do is neither used nor paid for here
        shape = tuple(tensor.shape)
        offset: tuple[int, ...] = (0,) * len(shape)
        if isinstance(tensor, DTensor):
            assert not any(placement.is_partial() for placement in tensor.placements), "a sum that was never reduced"
            offset = _offset(shape, tensor.device_mesh, tuple(tensor.placements))
            tensor = tensor._local_tensor
        return Piece(tensor.detach().cpu().clone(), offset, shape)


@cache
def _offset(shape: tuple[int, ...], mesh: DeviceMesh, placements: tuple[Placement, ...]) -> tuple[int, ...]:
    return tuple(compute_local_shape_and_global_offset(shape, mesh, placements)[1])


def assemble(held: Sequence[Mapping[str, Piece]], what: str) -> dict[str, Tensor]:
    """Whole tensors by name, from what each rank holds.

    Raises:
        AssertionError: Something is held by no rank, or differently by two.
    """
    names = list(dict.fromkeys(name for pieces in held for name in pieces))
    return {
        name: _assemble({rank: pieces[name] for rank, pieces in enumerate(held) if name in pieces}, f"{what}: {name}")
        for name in names
    }


def _assemble(pieces: Mapping[int, Piece], what: str) -> Tensor:
    first = next(iter(pieces.values()))
    for rank, piece in pieces.items():
        assert piece.shape == first.shape, f"{what} has shape {piece.shape} on rank {rank}, {first.shape} before"
        dtypes = piece.values.dtype, first.values.dtype
        assert dtypes[0] == dtypes[1], f"{what} is {dtypes[0]} on rank {rank}, {dtypes[1]} before"
    if all(piece.values.shape == piece.shape for piece in pieces.values()):
        for rank, piece in pieces.items():
            _assert_same(piece.values, first.values, what, rank)
        return first.values
    whole = torch.empty(first.shape, dtype=first.values.dtype)
    known = torch.zeros(first.shape, dtype=torch.bool)
    for rank, piece in pieces.items():
        if piece.values.numel() == 0:
            continue  # the shard of a rank beyond the end of a small tensor
        region = tuple(slice(start, start + size) for start, size in zip(piece.offset, piece.values.shape, strict=True))
        twice = known[region]
        if twice.any():
            _assert_same(piece.values[twice], whole[region][twice], what, rank)
        whole[region] = piece.values
        known[region] = True
    assert bool(known.all()), f"{what}: {int((~known).sum())} of {known.numel()} elements are held by no rank"
    return whole


def _assert_same(values: Tensor, before: Tensor, what: str, rank: int) -> None:
    same = torch.equal(values, before) or torch.allclose(values, before, rtol=0.0, atol=0.0, equal_nan=True)
    assert same, f"{what} is held by rank {rank} with other values than by the ranks before it"
