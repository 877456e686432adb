"""Gradients of split tensors that a module asks for: parts of the whole's gradient, as the tensors are of the whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from lightning_effi.tensor_parallel.collectives import take
from lightning_effi.tensor_parallel.rules.wholes import run_on_wholes
from lightning_effi.tensor_parallel.split import SplitTensor, split_tensors, wrap

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


def grad(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """``torch.autograd.grad(outputs, inputs, ...)`` for replicated outputs."""
    given = dict(zip(("outputs", "inputs"), args, strict=False)) | kwargs
    if split_tensors(given["outputs"]):
        return run_on_wholes(func, args, kwargs)
    inputs = [given["inputs"]] if isinstance(given["inputs"], Tensor) else list(given["inputs"])
    return tuple(like(gradient, tensor) for gradient, tensor in zip(func(*args, **kwargs), inputs, strict=True))


def like(gradient: Any, tensor: Any) -> Any:
    """``gradient`` (or another tensor of the same values' places) as the part that ``tensor`` is."""
    if not isinstance(gradient, Tensor) or not isinstance(tensor, SplitTensor) or tensor.placement.dim is None:
        return gradient
    return wrap(gradient, tensor.placement)


def register_hook(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """The hook sees, and may return, a gradient of the whole."""
    tensor, hook = (*args, *kwargs.values())
    split = tensor.placement
    if split.dim is None:
        return func(tensor, hook)

    def on_part(gradient: Tensor) -> Tensor | None:
        changed = hook(wrap(gradient, split))
        if changed is None or isinstance(changed, SplitTensor):
            return None if changed is None else changed.as_subclass(Tensor)
        return take(changed, split.dim, split.pieces, split.group)

    return func(tensor, on_part)


RULES: dict[str, Any] = {"grad": grad, "register_hook": register_hook}
