"""What runs on gathered wholes: functions without a rule for parts, and uses that a rule does not cover."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils._pytree import tree_leaves

from lightning_effi.sharded_tensors.names import is_in_place
from lightning_effi.tensor_parallel.collectives import take
from lightning_effi.tensor_parallel.split import CannotSplitError, SplitTensor, gathered, split_tensors, whole_shape

_listeners: list[Callable[[str, frozenset[str]], None]] = []


def run_on_wholes(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """All-gather each split argument and call ``func``, on every rank alike; the result is whole.

    Raises:
        CannotSplitError: where ``func`` would write into a part, or uses a weight that is stored in parts.
    """
    name = getattr(func, "__name__", "")
    operands = [t for t in split_tensors(args, kwargs) if t.placement.dim is not None]
    sources: frozenset[str] = frozenset().union(*(t.placement.sources for t in operands))
    if sources and not all(t.placement.sources for t in operands):
        from lightning_effi.tensor_parallel.rules import apply_rule

        # keys that were computed by sequence (there are fewer heads than ranks) meet queries that are split by heads
        args, kwargs = (gathered(tree, where=lambda split: not split.sources) for tree in (args, kwargs))
        return apply_rule(func, args, kwargs)
    in_place = is_in_place(name)
    target = args[0] if in_place and args else None
    if in_place and not (isinstance(target, SplitTensor) and target.placement.yields):
        raise CannotSplitError(f"'{name}' writes into a tensor that is split", sources)
    if kwargs.get("out") is not None:
        raise CannotSplitError(f"'{name}' writes into a tensor that is split", sources)
    is_stored = any(hasattr(leaf, "device_mesh") for leaf in tree_leaves((args, kwargs)))
    if is_stored and not all(tensor.placement.yields for tensor in operands):
        raise CannotSplitError(f"'{name}' uses a weight that is split in another way than a product", sources)
    for listener in _listeners:
        listener(name, sources)
    if target is not None:
        return _write(func, target, args, kwargs)
    return func(*gathered(args), **gathered(kwargs))


def _write(func: Callable[..., Any], target: SplitTensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Change a copy of the whole, then this rank's part of it, through which gradients flow back."""
    split, whole = target.placement, gathered(target).clone()
    func(whole, *gathered(args[1:]), **gathered(kwargs))
    if whole.shape != whole_shape(target):
        raise CannotSplitError("the shape of a tensor that is split is changed in place", split.sources)
    target.copy_(whole if split.dim is None else take(whole, split.dim, split.pieces, split.group))
    return target


@contextmanager
def on_gather(listener: Callable[[str, frozenset[str]], None]) -> Iterator[None]:
    """Inside, ``listener(function name, layers)`` is called whenever wholes are gathered for want of a rule."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)
