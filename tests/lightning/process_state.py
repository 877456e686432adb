"""What a run may change around it, as it stands at one moment: of the process, and of the objects a user hands over."""

from __future__ import annotations

import logging
import os
import random
import signal
import threading
from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
import numpy
import torch
from lightning.pytorch.trainer import trainer as trainer_module
from torch.distributed.fsdp import FSDPModule
from torch.nn.utils import clip_grad

State = dict[str, Any]


def process_state() -> State:
    """Everything process-wide that a strategy may have touched; equal states compare equal."""
    return {
        "changed classes of FSDP2": [k for k in _subclasses(FSDPModule) if not k.__name__.startswith("FSDP")],
        "Lightning's check of compiled modules": trainer_module._verify_strategy_supports_compile,
        "clip_grad_norm_": vars(clip_grad)["_get_total_norm"],
        "fast path of attention": torch.backends.mha.get_fastpath_enabled(),
        "torch.compile compiles": _compiles(),
        "function modes": torch._C._len_torch_function_stack(),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "gradients": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "default dtype": torch.get_default_dtype(),
        "threads of operators": torch.get_num_threads(),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "signal handlers": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "environment": dict(os.environ),
        "filters of loggers": {
            name: list(logger.filters)
            for name, logger in logging.root.manager.loggerDict.items()
            if isinstance(logger, logging.Logger)
        },
        "Python's random numbers": random.getstate(),
        "NumPy's random numbers": numpy.random.get_state()[1].tolist(),  # type: ignore[index]
    }


def objects_state(trainer: pl.Trainer, module: pl.LightningModule) -> State:
    """What the user's objects carry besides their values."""
    state: State = {"callbacks": list(trainer.callbacks)}  # type: ignore[attr-defined]
    for name, child in module.named_modules():
        state[f"class of '{name}'"] = type(child)
        state |= {f"'{name}' has {key}": True for key in vars(child).keys() - _LIGHTNINGS}
        state[f"hooks of '{name}'"] = {
            key: list(value) for key, value in vars(child).items() if "hooks" in key and isinstance(value, Mapping)
        }
        if hasattr(child, "dist_sync_fn"):
            state[f"groups of metric '{name}'"] = (child.process_group, child.dist_sync_fn)
    state["parameters"] = {name: type(parameter) for name, parameter in module.named_parameters()}
    return state


def optimizer_state(optimizer: torch.optim.Optimizer) -> State:
    """Of an optimizer, beside the state of its parameters."""
    return {"attributes": sorted(vars(optimizer)), "zero_grad": getattr(optimizer.zero_grad, "__func__", None)}


def changes(before: State, after: State) -> dict[str, tuple[Any, Any]]:
    """What is otherwise: by name, before and after."""
    return {
        name: (before.get(name), after.get(name))
        for name in before.keys() | after.keys()
        if before.get(name) != after.get(name)
    }


# What Lightning itself notes on a module that it trains.
_LIGHTNINGS = {"_trainer", "_device_mesh", "_current_fx_name", "_metric_attributes", "_hparams", "_hparams_initial"}


def _subclasses(kind: type) -> list[type]:
    return [found for direct in kind.__subclasses__() for found in (direct, *_subclasses(direct))]


def _compiles() -> bool:
    """Whether ``torch.compile`` hands a function to its backend."""
    graphs: list[Any] = []

    def backend(graph: Any, _inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))
    return bool(graphs)
