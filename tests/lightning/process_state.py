"""What a run may change around it, as it stands at one moment: of the process, and of the objects a user hands over."""

from __future__ import annotations

import logging
import os
import random
import signal
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy
import torch
import torch.distributed as dist
import torchmetrics
from lightning.pytorch.trainer import trainer as trainer_module
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultMetric
from torch import nn
from torch.distributed import device_mesh, distributed_c10d
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad

State = dict[str, Any]

# Classes and modules of others, of which somebody might exchange a function.
_PATCHABLE: tuple[Any, ...] = (
    *(DTensor, torch.Tensor, nn.Parameter, nn.Module, FSDPModule, torchmetrics.Metric, _ResultMetric),
    *(torch.optim.Optimizer, torch.optim.AdamW, torch.autograd.Function, DTensor._op_dispatcher.sharding_propagator),
    *(pl.LightningModule, pl.Trainer, pl.Callback, pl.LightningDataModule),
    *(torch, nn.functional, torch.autograd, torch.random, torch.utils.checkpoint),
    *(dist, device_mesh, dist.GroupMember),
)


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
        "default device": torch.get_default_device(),
        "autocast": torch.is_autocast_enabled("cpu"),
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
        "process groups": (dist.is_initialized(), dist.group.WORLD, dist.get_rank(), dist.get_world_size()),
        "hooks of every module": _global_hooks("torch.nn.modules.module"),
        "hooks of every optimizer": _global_hooks("torch.optim.optimizer"),
        "settings of dynamo": torch._dynamo.config.get_config_copy(),
        "handlers of DTensor's operators": dict(DTensor._op_dispatcher._custom_op_handlers),
        "random operators of DTensor": set(DTensor._op_dispatcher._random_ops),
        **{f"attributes of {owner}": _attributes(owner) for owner in _PATCHABLE},
    }


def groups_state() -> State:
    """Process groups, and the files by which they talk: made by the first run of a layout, and kept for the next."""
    return {
        "open files": _open_files(),
        **_attributes(distributed_c10d),
        "counter": distributed_c10d._world.group_count,
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


def changes(before: State, after: State) -> dict[str, tuple[str, str]]:
    """What is otherwise: by name, before and after; of a table the entries that differ."""
    found: dict[str, tuple[str, str]] = {}
    for name in before.keys() | after.keys():
        was, now = before.get(name), after.get(name)
        if isinstance(was, dict) and isinstance(now, dict):
            found |= {f"{name}: {key}": values for key, values in changes(was, now).items()}
        elif was != now:
            found[name] = repr(was), repr(now)
    return found


# What Lightning itself notes on a module that it trains.
_LIGHTNINGS = {"_trainer", "_device_mesh", "_current_fx_name", "_metric_attributes", "_hparams", "_hparams_initial"}


def _subclasses(kind: type) -> list[type]:
    return [found for direct in kind.__subclasses__() for found in (direct, *_subclasses(direct))]


def _attributes(owner: Any) -> State:
    """Functions and tables of a class, module or object."""
    tables = (dict, list, set)
    functions = (classmethod, staticmethod, property)
    return {
        name: value.copy() if issubclass(type(value), tables) else value
        for name, value in vars(owner).items()
        if (issubclass(type(value), (*functions, *tables)) or callable(value)) and name != "__slotnames__"  # of pickle
    }


def _global_hooks(module: str) -> State:
    """What torch calls for every module, or every optimizer."""
    found = {name: value for name, value in vars(sys.modules[module]).items() if name.startswith("_global_")}
    return {name: list(value) if isinstance(value, Mapping) else value for name, value in found.items()}


def _open_files() -> list[str]:
    paths = [Path("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
    return sorted(os.readlink(path) for path in paths if path.exists())


def _compiles() -> bool:
    """Whether ``torch.compile`` hands a function to its backend."""
    graphs: list[Any] = []

    def backend(graph: Any, _inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))
    return bool(graphs)
