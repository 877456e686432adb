"""What a module's own code reads from gradients that are sharded, split or both: values of the whole tensors.

Norms of such gradients are scalars of which every rank holds a summand. PyTorch makes them whole where one of them is
read (see ``sharded_tensors.installation``); where several meet, as in
``torch.stack([g.norm() for g in gradients])``, it refuses those of different meshes and those beside plain ones, and
``clip_grad_norm_`` with them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_effi.compat import dtensor as dtensor_compat
from lightning_effi.compat import torch as torch_compat
from lightning_effi.gradients.clipping import norm_of_each
from lightning_effi.sharded_tensors.names import asks_no_values
from lightning_effi.sharded_tensors.stale_parameters import EarlierParameter, resolved

_GRAD: Any = Tensor.grad
_CONSTRUCTORS = (torch.tensor, torch.as_tensor)


class ReadableShards(TorchFunctionMode):
    """Inside, scalars of sharded tensors meet others as the plain scalars that they are of the whole.

    Like every use of a sharded value this is something that all ranks must do.

    Args:
        shard_of: for a step that runs backward itself: the sharded parameter that a full one stands for in the middle
            of the step, ``None`` for any other tensor. The gradient of the one is then that of the other.
        backward: for such a step: what ``loss.backward()`` does, given the loss and the plain backward.
    """

    def __init__(
        self,
        shard_of: Callable[[Tensor], Tensor | None] = lambda _: None,
        backward: Callable[[Tensor, Callable[[], None]], None] = lambda _, run: run(),
    ) -> None:
        super().__init__()
        self._shard_of = shard_of
        self._backward = backward
        self._is_paused = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, every parameter has its own gradient."""
        was_paused, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = was_paused

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if EarlierParameter in types:
            args, kwargs = resolved(args, kwargs)
        if getattr(func, "__self__", None) is _GRAD:
            if (
                not self._is_paused
                and not torch_compat.in_backward()
                and (shard := self._shard_of(args[0])) is not None
            ):
                args = (shard, *args[1:])
        elif func is Tensor.backward and not self._is_paused:
            return self._backward(args[0], partial(func, *args, **kwargs))
        elif func in _CONSTRUCTORS and args and isinstance(args[0], (list, tuple)):
            args = (_numbers(args[0]), *args[1:])
        elif func is torch._foreach_norm and _meet(args[0]):
            return norm_of_each(args[0], *args[1:], **kwargs)
        elif func is torch._foreach_mul_ and _meet(args[0]):
            return func(
                [dtensor_compat.local_tensor(tensor) for tensor in args[0]], *_whole_scalars(args[1:]), **kwargs
            )
        elif not types or asks_no_values(func):  # plain tensors, or nothing that they could meet in
            pass
        elif _meet(tensors := list(_tensors((args, kwargs)))) and all(t.dim() == 0 for t in tensors if _mesh(t)):
            args, kwargs = _whole_scalars(args), _whole_scalars(kwargs)
        return func(*args, **kwargs)


def _meet(tensors: Sequence[Tensor]) -> bool:
    """Whether these tensors, some of them sharded, are not all of one mesh."""
    return len({_mesh(tensor) for tensor in tensors}) > 1


def _mesh(tensor: Tensor) -> Any:
    """``None`` for a plain tensor."""
    return getattr(tensor, "device_mesh", None)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


def _whole_scalars(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(_whole_scalars(item) for item in value)
    if isinstance(value, dict):
        return {key: _whole_scalars(item) for key, item in value.items()}
    if isinstance(value, Tensor) and _mesh(value) is not None and value.dim() == 0:
        return value.full_tensor()  # type: ignore[attr-defined]
    return value


def _numbers(values: Any) -> Any:
    """``torch.tensor`` would read memory that sharded scalars do not have."""
    if isinstance(values, (list, tuple)):
        return type(values)(_numbers(value) for value in values)
    if isinstance(values, Tensor) and _mesh(values) is not None and values.numel() == 1:
        return values.item()
    return values
