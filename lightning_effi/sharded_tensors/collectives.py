"""Collectives of a module's own hooks: ``torch.distributed.all_reduce(parameter.grad)`` and the like.

Scripts that were written for DistributedDataParallel average, broadcast and gather parameters and gradients, of which
every rank has the whole there. Sent as they are, shards would mix different rows of different ranks. Here each rank
takes part with the whole, and keeps its part of what comes out.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_effi.sharded_tensors.wholes import is_sharded_tensor, whole

# What comes out of these is the same on all ranks that take part, if what goes in is.
_ALIKE = ("allreduce", "broadcast", "allgather", "_allgather_base")
_SENDS_ONLY = ("send", "check_for_nan", "barrier", "monitored_barrier")


def collective(write: Any, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Carry out a collective, one of ``torch.ops.c10d``, on the whole of each sharded tensor.

    It has ended when this returns. ``write(tensor, values)`` writes into a sharded tensor.

    Raises:
        RuntimeError: where the result would differ between the ranks, which cannot all keep a part of it.
    """
    name = operator.name().removeprefix("c10d::").rstrip("_")
    outputs = [] if name.startswith(_SENDS_ONLY) else _outputs(operator, args, kwargs)
    if outputs and not name.startswith(_ALIKE):
        raise RuntimeError(
            f"torch.distributed.{name} would write into a parameter or gradient that is sharded, other values on each"
            " rank. Write into a tensor of your own (torch.empty(tensor.shape)), or use all_reduce or broadcast"
        )
    wholes: dict[int, Tensor] = {}

    def full(tensor: Any) -> Tensor:
        if id(tensor) not in wholes:
            wholes[id(tensor)] = whole(tensor.detach()).clone()
        return wholes[id(tensor)]

    def replaced(tree: Any) -> Any:
        return tree_map_only(Tensor, lambda leaf: full(leaf) if is_sharded_tensor(leaf) else leaf, tree)

    result = operator(*replaced(args), **replaced(kwargs))
    work = result[-1] if isinstance(result, tuple) else result
    if work is not None:
        work.wait()
    for tensor in outputs:
        write(tensor, wholes[id(tensor)])
    return (args[0], work) if isinstance(result, tuple) else result


def _outputs(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The sharded tensors that a collective writes into: all but its inputs, as its signature names them."""
    found: dict[int, Any] = {}
    for argument, value in zip(operator._schema.arguments, args, strict=False):
        if not argument.name.startswith("input"):
            found |= {id(leaf): leaf for leaf in tree_leaves(value) if is_sharded_tensor(leaf)}
    return list(found.values())
