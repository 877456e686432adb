"""Random numbers inside a tensor-parallel group.

Replicated activations must be dropped alike on all ranks of a group, or they are no longer replicated; parts must be
dropped independently of each other. So all ranks draw from equal generators, and an operator on a part is seeded from
the next number of that common stream and the rank. Recomputation in backward restores the stream and so the masks.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def per_rank(rank: int, device: torch.device) -> Iterator[None]:
    """Inside, the generator of ``device`` is this rank's own; the common stream moves on by one number."""
    seed = int(torch.randint(2**62, ()))
    module = torch.cuda if device.type == "cuda" else torch.random
    state = module.get_rng_state()
    module.manual_seed(seed + rank)
    try:
        yield
    finally:
        module.set_rng_state(state)


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
