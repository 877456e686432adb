"""Random numbers inside a tensor-parallel group.

Replicated activations must be dropped alike on all ranks of a group, or they are no longer replicated; parts must be
dropped independently of each other. So all ranks draw from equal generators, and for parts they draw for the whole (see
:mod:`lightning_effi.tensor_parallel.rules.draws`): the common stream moves on as that of one process. Recomputation in
backward restores the stream and so the masks.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def own_draws(rank: int, device: torch.device, ratio: float) -> Iterator[None]:
    """Inside, a kernel that draws for itself (fused attention on CUDA) draws numbers of this rank's own.

    Afterwards the common stream has moved on by as much as the kernel would have moved it for the whole, of which the
    part is one ``ratio``-th: by heads.
    """
    generator = torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
    state, offset = generator.get_state(), generator.get_offset()
    generator.manual_seed((generator.initial_seed() + (offset + 1) * 0x9E3779B97F4A7C15 + rank) % (1 << 63))
    try:
        yield
    finally:
        drawn = generator.get_offset()
        generator.set_state(state)
        generator.set_offset(offset + round(drawn * ratio))


def agree_on_randomness(group: Any, data_parallel_rank: int) -> None:
    """Give the ranks of a tensor-parallel group the state of Python's, NumPy's and torch's generators of its first.

    Other data-parallel ranks continue from another seed of torch's, so that they drop other elements.

    Args:
        group: with a backend for CPU tensors.
        data_parallel_rank: which batches this rank works on.
    """
    import numpy
    import torch.distributed as dist

    state: list[Any] = [(random.getstate(), numpy.random.get_state(), torch.get_rng_state())]
    dist.broadcast_object_list(state, group=group, group_src=0)
    python, numpy_state, torch_state = state[0]
    random.setstate(python)
    numpy.random.set_state(numpy_state)
    torch.set_rng_state(torch_state)
    if torch.cuda.is_available():
        torch.cuda.manual_seed(torch.initial_seed() + data_parallel_rank)
    if data_parallel_rank:
        torch.manual_seed(torch.initial_seed() + data_parallel_rank)
