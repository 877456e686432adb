"""What each torch function does with split tensors, by the function's name.

A method, its counterpart in ``torch`` and that in ``torch.nn.functional`` share a name and a rule. A function without
a rule runs on gathered wholes; :func:`on_gather` lets planning learn of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lightning_effi import _compat
from lightning_effi.tensor.rules import attention, elementwise, gradients, layers, products, reductions, shapes
from lightning_effi.tensor.split import CannotSplitError, gathered, split_tensors

Rule = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]

RULES: dict[str, Rule] = {
    **elementwise.RULES,
    **shapes.RULES,
    **reductions.RULES,
    **products.RULES,
    **layers.RULES,
    **attention.RULES,
    **gradients.RULES,
}

# Questions about a tensor whose answer is the same for a part and for the whole, and factories that ask for its dtype.
_PASSED = frozenset(
    {"dim", "is_contiguous", "is_floating_point", "is_complex", "element_size", "get_device", "type",
     "requires_grad_", "retain_grad", "backward", "is_inference", "is_nonzero", "__hash__", "__format__",
     "has_names", "__repr__", "is_same_size", "_is_view", "storage_offset", "stride", "data_ptr", "is_pinned",
     "result_type", "is_tensor", "new_zeros", "new_ones", "new_empty", "new_full", "new_tensor"}
)  # fmt: skip
_SHAPE_GETTERS = frozenset({"shape"})
_RULE_GETTERS = frozenset({"T", "mT", "real", "imag"})
_PART_GETTERS = frozenset({"grad", "data"})

_listeners: list[Callable[[str, frozenset[str]], None]] = []


def apply_rule(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Called for every torch function that gets a split tensor, with the dispatch to subclasses switched off."""
    if isinstance(func, _compat.Operator):
        return func(*args, **kwargs)  # backward under a dispatch mode (a FLOP counter, say) works on parts already
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__"):
        return _property(func, name, args)
    rule = RULES.get(name)
    if rule is not None:
        try:
            return rule(func, args, kwargs)
        except CannotSplitError as error:
            if error.sources:
                raise
            return _on_wholes(func, name, args, kwargs)  # parts of a sequence, which no layer depends on
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
    return gradients.like(value, args[0]) if kind == "__get__" and name in _PART_GETTERS else value


def _on_wholes(func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    operands = [t for t in split_tensors(args, kwargs) if t.placement.dim is not None]
    sources: frozenset[str] = frozenset().union(*(t.placement.sources for t in operands))
    if sources and not all(t.placement.sources for t in operands):
        # keys that were computed by sequence (there are fewer heads than ranks) meet queries that are split by heads
        args, kwargs = (gathered(tree, where=lambda split: not split.sources) for tree in (args, kwargs))
        return apply_rule(func, args, kwargs)
    if (name.endswith("_") and not name.endswith("__")) or name == "__setitem__" or kwargs.get("out") is not None:
        raise CannotSplitError(f"'{name}' writes into a tensor that is split", sources)
    for listener in _listeners:
        listener(name, sources)
    return func(*gathered(args), **gathered(kwargs))


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
