"""What each torch function does with split tensors, by the function's name.

A method, its counterpart in ``torch`` and that in ``torch.nn.functional`` share a name and a rule. A function without
a rule runs on gathered wholes; :func:`on_gather` lets planning learn of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from lightning_effi.compat import torch as torch_compat
from lightning_effi.tensor_parallel.rules import (
    attention,
    dims,
    draws,
    elementwise,
    gradients,
    layers,
    pieces,
    products,
    reductions,
    sizes,
    views,
    vocabulary,
)
from lightning_effi.tensor_parallel.rules.wholes import on_gather, run_on_wholes
from lightning_effi.tensor_parallel.split import (
    CannotSplitError,
    gathered,
    split_tensors,
    wrap,
)

Rule = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]

__all__ = ["RULES", "apply_rule", "on_gather"]

RULES: dict[str, Rule] = {
    **elementwise.RULES,
    **sizes.RULES,
    **views.RULES,
    **dims.RULES,
    **pieces.RULES,
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
            return run_on_wholes(func, args, kwargs)
    if name in _PASSED:
        return func(*args, **kwargs)
    return run_on_wholes(func, args, kwargs)


def _property(func: Any, kind: str, args: tuple[Any, ...]) -> Any:
    name = func.__self__.__name__
    if kind == "__get__" and name in _SHAPE_GETTERS:
        return sizes.size(func, args, {})
    if kind == "__get__" and name in _RULE_GETTERS:
        return RULES[name](func, args, {})
    value = func(*args)
    if kind == "__get__" and isinstance(value, Tensor):  # ``data``, ``grad`` and the like
        if value.shape != args[0].shape:
            return func(*gathered(args))
        return wrap(value, args[0].placement)
    return value
