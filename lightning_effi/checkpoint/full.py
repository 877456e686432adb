"""The ``full`` format: one file under the module's own names, loadable by plain Lightning without this package."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from lightning_effi.comm.gather import gather_full
from lightning_effi.data_parallel.optimizers import shard_like
from lightning_effi.modules import describe_parameters


def gather_model(module: nn.Module, keep: bool) -> dict[str, Any]:
    """``module.state_dict()`` with full values on the CPU; a tied tensor is one tensor, as in the module."""
    state = module.state_dict()
    tied = tied_names(module)
    full = gather_full({key: value for key, value in state.items() if tied.get(key) not in state}, keep)
    return {key: full[tied[key] if tied.get(key) in full else key] for key in state} if keep else {}


def tied_names(module: nn.Module) -> dict[str, str]:
    """Further names of tied parameters, each with the parameter's first name."""
    return {other: info.name for info in describe_parameters(module) for other in info.also_named}


def load_file(path: Path, weights_only: bool | None) -> dict[str, Any]:
    """Map a checkpoint file into memory; its pages are only read where they are used.

    ``weights_only=None`` means ``True``: a checkpoint is data, and only the caller can vouch for one that is more.
    """
    return torch.load(path, map_location="cpu", mmap=True, weights_only=weights_only is not False)


def load_model(module: nn.Module, state: Mapping[str, Any], strict: bool) -> None:
    """``module.load_state_dict`` with full tensors, or this rank's parts of them; the module may be sharded already.

    Values of a module on ``meta`` are put in place instead of copied.
    """
    current = module.state_dict()
    wanted = {key: shard_like(value, current[key]) if key in current else value for key, value in state.items()}
    on_meta = any(isinstance(value, Tensor) and value.is_meta for value in current.values())
    if on_meta:
        wanted = tree_map(lambda v: v.clone() if isinstance(v, Tensor) else v, wanted)  # not a view of the file
    module.load_state_dict(wanted, strict=strict, assign=on_meta)


def load_optimizer(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """``optimizer.load_state_dict`` with full moments, or this rank's parts, sharded as its parameters are."""
    own = by_position(optimizer, state)
    sharded = {
        position: {key: shard_like(value, own[position]) for key, value in entries.items()}
        for position, entries in state["state"].items()
    }
    optimizer.load_state_dict({**state, "state": sharded})


def by_position(optimizer: Optimizer, state: Mapping[str, Any]) -> dict[int, Tensor]:
    """The optimizer's parameters by their position in a state dict."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    positions = [position for group in state["param_groups"] for position in group["params"]]
    if len(positions) != len(parameters):
        raise ValueError(
            f"the checkpoint's {type(optimizer).__name__} has {len(positions)} parameters, this one has"
            f" {len(parameters)}: was it saved by another configure_optimizers?"
        )
    return dict(zip(positions, parameters, strict=True))
