"""A module in parts does not take new names for its parameters: pruning and parametrizations in the middle of a run."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.utils.parametrize import ParametrizationList

from lightning_effi.compat import torch as torch_compat
from lightning_effi.modules.undo import Undo
from lightning_effi.modules.user_code import frames_of, line_outside_of_this_package


class NewNames:
    """Refuses to register parameters of ``module`` anew, for the length of a run.

    ``torch.nn.utils.prune``, ``register_parametrization`` and ``weight_norm`` put a computed weight in the place of a
    parameter. On a split layer they would compute it from a part, and a pipeline's stage has other names than the next
    one; before the module is split they are a part of it like any other.

    Args:
        module: which has been split.
        setting: that has split it, as a user writes it.
        undo: told how to stop.
    """

    def __init__(self, module: nn.Module, setting: str, undo: Undo) -> None:
        self._module = module
        self._setting = setting
        for handle in (
            register_module_parameter_registration_hook(self._on_parameter),
            register_module_module_registration_hook(self._on_module),
        ):
            undo.push(handle.remove, "hook on registrations in modules")

    def _on_parameter(self, owner: nn.Module, name: str, parameter: Any) -> None:
        if owner._parameters.get(name) is parameter:  # tied anew, as it is already
            return
        parametrized = isinstance(owner, ParametrizationList)
        place = self._place(torch_compat.layer_being_parametrized(sys._getframe(1)) if parametrized else owner)
        if place is not None:
            self._refuse(f"'{place or type(owner).__name__}' is given the parameter '{name}'")

    def _on_module(self, owner: nn.Module, name: str, child: nn.Module | None) -> None:
        if isinstance(owner, ParametrizationList) and (place := self._place(owner)) is not None:
            self._refuse(f"'{place}' is given a further parametrization")

    def _place(self, owner: nn.Module | None) -> str | None:
        return next((name for name, module in self._module.named_modules() if module is owner), None)

    def _refuse(self, what: str) -> None:
        line = line_outside_of_this_package(frames_of(sys._getframe(2)))
        if not line:
            return
        raise RuntimeError(
            f"{what} in the middle of a run{line}. {self._setting} leaves a part of the module on each rank, whose"
            " parameters cannot be exchanged for computed ones (pruning, parametrizations). Do it before the first"
            " batch, in setup() or on_train_start(), or use ZeRO alone (any zero_stage, without tensor and pipeline"
            " parallelism)"
        )
