"""Parameters that user code took hold of before the module was sharded: lists, dicts, closures.

Sharding puts other parameters into the module. A list made in ``__init__`` would go on with ones that nobody trains,
without a word: ``clip_grad_norm_(self.backbone_parameters)`` does nothing, a weight used in two places is no longer
shared. The former parameter therefore hands whatever is done with it to the one that the module has in its place.
"""

from __future__ import annotations

import copy
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

_PLACE = "_lightning_effi_place"


@dataclass
class _Place:
    """Where the module has a parameter now."""

    module: weakref.ref[nn.Module]
    name: str


class EarlierParameter(nn.Parameter):
    """A parameter that stands for the one of its name that the module has now."""

    _place: _Place

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = resolved(args, kwargs or {})
        return func(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> Any:
        return copy.deepcopy(current(self), memo)


def resolved(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Arguments of a torch function, with the parameters that the module has now."""
    return tree_map_only(EarlierParameter, current, (args, kwargs))  # type: ignore[no-any-return]


def current(parameter: EarlierParameter) -> Tensor:
    """The parameter that the module has in the place of ``parameter``."""
    place = parameter._place
    module = place.module()
    if module is None:
        raise RuntimeError(f"the parameter '{place.name}' belongs to a module that is gone")
    return module.get_parameter(place.name)


def hand_over(parameter: nn.Parameter, module: nn.Module, name: str) -> None:
    """From now on ``parameter`` stands for ``module``'s parameter of that name; its own memory is freed."""
    if type(parameter) is not nn.Parameter or parameter is module.get_parameter(name):
        return
    parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
    parameter.grad = None
    parameter._place = _Place(weakref.ref(module), name)  # type: ignore[attr-defined]
    setattr(module.get_parameter(name), _PLACE, parameter._place)  # type: ignore[attr-defined]
    parameter.__class__ = EarlierParameter


def rename(parameter: nn.Parameter, module: nn.Module, name: str) -> None:
    """``module`` has ``parameter``, to which an earlier one was handed over, under another name from now on."""
    if (place := getattr(parameter, _PLACE, None)) is not None:
        place.module, place.name = weakref.ref(module), name
