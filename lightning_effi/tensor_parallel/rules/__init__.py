"""What each torch function does with split tensors, by the function's name.

A method, its counterpart in ``torch`` and that in ``torch.nn.functional`` share a name and a rule. A function without
a rule runs on gathered wholes; :func:`on_gather` lets planning learn of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from lightning_effi.compat import torch as torch_compat
from lightning_effi.sharded_tensors.names import is_in_place
from lightning_effi.tensor_parallel.collectives import take
from lightning_effi.tensor_parallel.rules import (
    attention,
    draws,
    elementwise,
    gradients,
    layers,
    products,
    reductions,
    shapes,
    vocabulary,
)
from lightning_effi.tensor_parallel.split import (
    CannotSplitError,
    SplitTensor,
    gathered,
    split_tensors,
    whole_shape,
    wrap,
)

Rule = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]

RULES: dict[str, Rule] = {
    **elementwise.RULES,
    **shapes.RULES,
    **reductions.RULES,
    **products.RULES,
    **layers.RULES,
    **attention.RULES,
    **vocabulary.RULES,
    **draws.RULES,
    **gradients.RULES,
}

# Questions about a tensor whose answer is the same for a part and for the whole, and factories that ask for its dtype.
_PASSED = frozenset(
    {"dim", "is_contiguous", "is_floating_point", "is_complex", "element_size", "get_device", "type",
     "requires_grad_", "retain_grad", "backward", "is_inference", "is_nonzero", "__hash__", "__format__",
     "has_names", "__repr__", "is_same_size", "_is_view", "storage_offset", "stride", "data_ptr", "is_pinned",
     "result_type", "is_tensor", "new_tensor"}
)  # fmt: skip
_SHAPE_GETTERS = frozenset({"shape"})
_RULE_GETTERS = frozenset({"T", "mT", "real", "imag"})

_listeners: list[Callable[[str, frozenset[str]], None]] = []


def apply_rule(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Called for every torch function that gets a split tensor, with the dispatch to subclasses switched off."""
    if isinstance(func, torch_compat.Operator):
        return func(*args, **kwargs)  # backward under a dispatch mode (a FLOP counter, say) works on parts already
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__"):
        return _property(func, name, args)
    rule = RULES.get(name)
    if rule is not None:
        try:
            return rule(func, args, kwargs)
        except CannotSplitError as error:
            # parts of a sequence, which no layer depends on, give way to the whole, and so do logits
            if error.sources and not all(tensor.placement.yields for tensor in split_tensors(args, kwargs)):
                raise
            return _on_wholes(func, name, args, kwargs)
    if name in _PASSED:
        return func(*args, **kwargs)
    return _on_wholes(func, name, args, kwargs)


def _property(func: Any, kind: str, args: tuple[Any, ...]) -> Any:
    name = func.__self__.__name__
    if kind == "__get__" and name in _SHAPE_GETTERS:
        return shapes.size(func, args, {})
    if kind == "__get__" and name in _RULE_GETTERS:
        return RULES[name](func, args, {})
    value = func(*args)
    if kind == "__get__" and isinstance(value, Tensor):  # ``data``, ``grad`` and the like
        if value.shape != args[0].shape:
            return func(*gathered(args))
        return wrap(value, args[0].placement)
    return value


def _on_wholes(func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    operands = [t for t in split_tensors(args, kwargs) if t.placement.dim is not None]
    sources: frozenset[str] = frozenset().union(*(t.placement.sources for t in operands))
    if sources and not all(t.placement.sources for t in operands):
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


def fall_back(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """For rules: this use of the function is not covered."""
    return _on_wholes(func, getattr(func, "__name__", ""), args, kwargs)
