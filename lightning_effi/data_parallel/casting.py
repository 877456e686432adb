"""A whole module whose parameters are computed with in another dtype than they are stored in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from lightning_effi.data_parallel.plan import Compute, everywhere_low


@contextmanager
def computed_in(compute: Compute, module: nn.Module) -> Iterator[None]:
    """Inside, the parameters of an unsharded module have the dtype in which gathered ones are computed with.

    That of matmul weights alone (autocast) is left to autocast, which gives the same numbers.
    """
    stored: dict[nn.Parameter, Tensor] = {}
    if compute.everywhere and compute.dtype is not None:
        for name in everywhere_low(module, compute):
            parameter = module.get_parameter(name)
            stored[parameter], parameter.data = parameter.data, parameter.data.to(compute.dtype)
    try:
        yield
    finally:
        for parameter, data in stored.items():
            parameter.data = data
