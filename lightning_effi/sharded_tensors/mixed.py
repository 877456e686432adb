"""Sharded parameters in plain computations: penalties over ``self.parameters()``, functional use of a weight.

In stage 3 a block's parameters are only whole inside its ``forward``. Elsewhere in a step they are DTensors, which
torch refuses to mix with plain tensors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from lightning_effi.sharded_tensors.names import asks_no_values, is_in_place, needs_whole
from lightning_effi.sharded_tensors.stale_parameters import EarlierParameter, resolved


class WholeWhereMixed(TorchFunctionMode):
    """Inside, a DTensor that meets a plain tensor takes part with its full value.

    Attributes:
        was_needed: whether that has happened.
    """

    def __init__(self) -> None:
        super().__init__()
        self.was_needed = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from torch.distributed.tensor import DTensor

        # Without ``types`` all are plain tensors. In place it would be into a full copy that nobody keeps: torch's own
        # refusal is better.
        if not types or asks_no_values(func) or is_in_place(getattr(func, "__name__", "")):
            return func(*args, **(kwargs or {}))
        if EarlierParameter in types:
            args, kwargs = resolved(args, kwargs or {})
        leaves, tree = tree_flatten((args, kwargs or {}))
        # a weight that tensor parallelism splits is a DTensor inside its block too, over the tensor axis alone
        sharded = [isinstance(leaf, DTensor) and "shard" in (leaf.device_mesh.mesh_dim_names or ()) for leaf in leaves]
        plain = (isinstance(leaf, Tensor) and not isinstance(leaf, DTensor) for leaf in leaves)
        if any(sharded) and (any(plain) or needs_whole(func)):
            self.was_needed = True
            pairs = zip(leaves, sharded, strict=True)
            whole = [_Whole.apply(leaf) if is_sharded else leaf for leaf, is_sharded in pairs]
            args, kwargs = tree_unflatten(whole, tree)
        return func(*args, **(kwargs or {}))


class _Whole(torch.autograd.Function):
    """The full value of a DTensor; its gradient is averaged over the ranks, as those of gathered parameters are."""

    @staticmethod
    def forward(ctx: Any, tensor: Any) -> Tensor:
        ctx.mesh, ctx.placements = tensor.device_mesh, tensor.placements
        return tensor.full_tensor()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        from torch.distributed.tensor import DTensor, Partial, Replicate

        mesh = ctx.mesh
        mean = DTensor.from_local(gradient / mesh.size(), mesh, [Partial()] * mesh.ndim, run_check=False)
        return mean.redistribute(placements=[p if p.is_shard() else Replicate() for p in ctx.placements])
