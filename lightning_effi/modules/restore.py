"""One training step of the parallel module against the same step of the plain module.

Both run on the same batch, with dropout off and logging stubbed. Whatever the step changes besides gradients (buffers,
metrics, counters, randomness) is put back afterwards.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from lightning_effi.compat import torch as torch_compat
from lightning_effi.modules.parameters import attributes
from lightning_effi.modules.randomness import Randomness
from lightning_effi.modules.snapshot import Snapshot

_DROPOUTS = {
    F.dropout,
    F.dropout1d,
    F.dropout2d,
    F.dropout3d,
    F.alpha_dropout,
    F.feature_alpha_dropout,
    torch.dropout,
}


class NoDropout(TorchFunctionMode):
    """Every dropout keeps everything, including that inside scaled dot-product attention.

    Attributes:
        changes: whether the step computes something else outside.
    """

    def __init__(self) -> None:
        super().__init__()
        self.changes = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _DROPOUTS:
            self.changes |= bool(args[1] if len(args) > 1 else kwargs.get("p", 0.5))
            return args[0] if args else kwargs["input"]
        if func is F.scaled_dot_product_attention:
            self.changes |= bool(args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0))
            if len(args) > 4:
                args = (*args[:4], 0.0, *args[5:])
            elif "dropout_p" in kwargs:
                kwargs["dropout_p"] = 0.0
        return func(*args, **kwargs)


def copied(module: nn.Module) -> Any:
    """A deep copy. What cannot be copied is, for handles of hooks that the module keeps, that of the original, and for
    activations (attention weights that a layer remembers, a weight that a hook computes) a tensor without history.
    """
    memo: dict[int, Any] = {}
    kept = [value for submodule in module.modules() for value in vars(submodule).values()]
    for leaf in tree_leaves(kept):
        if isinstance(leaf, RemovableHandle):
            memo[id(leaf)] = leaf
        elif isinstance(leaf, Tensor) and not leaf.is_leaf:
            memo[id(leaf)] = leaf.detach().clone()
    copy_of_module = copy.deepcopy(module, memo)
    for original, twin in zip(module.modules(), copy_of_module.modules(), strict=True):
        # ``module.forward = torch.compile(module.forward)`` would run the original
        method = torch_compat.compiled_forward(original)
        if method is not None and getattr(method, "__self__", None) is original:
            twin.forward = MethodType(method.__func__, twin)
    for original_parameter, twin_parameter in zip(module.parameters(), copy_of_module.parameters(), strict=True):
        twin_parameter.__dict__.update(attributes(original_parameter))  # which torch leaves out
    return copy_of_module


def loss_of(output: Any) -> Tensor:
    """The loss in what ``training_step`` returned.

    Raises:
        ValueError: where there is none.
    """
    loss = output.get("loss") if isinstance(output, dict) else output
    if not isinstance(loss, Tensor):
        raise ValueError(f"training_step returned {type(output).__name__}, which holds no loss to compare")
    return loss


def of_size_one(loss: Tensor) -> Tensor:
    """The loss divided by its magnitude where that is large, so that its gradients fit into 16-bit float."""
    return loss / loss.detach().abs().clamp(min=1.0)


def backward_of(loss: Tensor) -> None:
    """Gradients of :func:`of_size_one`. Unlike ``loss.backward()``, what is recomputed on the way sees the modes that
    the forward saw (:class:`NoDropout`).
    """
    torch_compat.backward_in_modes(of_size_one(loss))


def plain_gradients(
    module: nn.Module, step: Callable[..., Any], *args: Any, **kwargs: Any
) -> tuple[Tensor, dict[str, Tensor | None]]:
    """Loss and gradients of ``step(*args, **kwargs)`` for the parameters of a plain module; its gradients are cleared.

    The gradients are those of :func:`of_size_one`.
    """
    for parameter in module.parameters():
        parameter.grad = None
    loss = loss_of(step(*args, **kwargs))
    backward_of(loss)
    gradients = {name: parameter.grad for name, parameter in module.named_parameters() if parameter.requires_grad}
    for parameter in module.parameters():
        parameter.grad = None
    return loss.detach(), gradients


@contextmanager
def restored(module: nn.Module) -> Iterator[None]:
    """Put back what ``module`` holds besides parameters, object by object, and all randomness, on leaving."""
    before = Snapshot(module)
    randomness = Randomness(module)
    drawn = randomness.get()
    try:
        yield
    finally:
        before.put_back()
        randomness.set(drawn)


@contextmanager
def silent(module: nn.Module) -> Iterator[None]:
    """``self.log`` and ``self.log_dict`` do nothing inside."""
    stubs = ("log", "log_dict")
    for name in stubs:
        module.__dict__[name] = lambda *args, **kwargs: None
    try:
        yield
    finally:
        for name in stubs:
            del module.__dict__[name]


@contextmanager
def same_randomness(module: nn.Module | None = None) -> Iterator[None]:
    """Put all randomness, that of the module's own generators too, back on leaving, so that what runs next draws the
    same numbers.
    """
    randomness = Randomness(module)
    drawn = randomness.get()
    try:
        yield
    finally:
        randomness.set(drawn)
