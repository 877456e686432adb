"""One checkpoint of a module whose parameters lie on several stages: gathered, by name, on the first."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer

from lightning_effi.checkpoint import full
from lightning_effi.pipeline.stages import StageParameters


def gather_model(module: nn.Module, stages: StageParameters) -> dict[str, Any]:
    """The state dict of the whole module on the first stage, ``{}`` elsewhere; all ranks must call this."""
    merged: dict[str, Any] = {}
    for state in reversed(stages.gather(full.gather_model(module, keep=True))):
        merged.update(state)  # of copies, the first stage's
    return {key: merged[key] for key in stages.state_keys if key in merged}


def gather_optimizer(optimizer: Optimizer, names: list[list[str]], stages: StageParameters) -> dict[str, Any]:
    """The optimizer's state dict as the whole module's optimizer would give it, on the first stage.

    Args:
        optimizer: of this stage.
        names: of all parameters of each group, in the order before the split.
        stages: of the pipeline.
    """
    state = full.gather_full(optimizer.state_dict(), keep=True)
    local = [[name for name in group if name in stages.local] for group in names]
    positions = [position for group in state["param_groups"] for position in group["params"]]
    named = dict(zip((name for group in local for name in group), positions, strict=True))
    by_name = {name: state["state"][position] for name, position in named.items() if position in state["state"]}
    merged: dict[str, Any] = {}
    for found in reversed(stages.gather(by_name)):
        merged.update(found)
    order = {name: position for position, name in enumerate(name for group in names for name in group)}
    groups = [
        {**group, "params": [order[name] for name in everything]}
        for group, everything in zip(state["param_groups"], names, strict=True)
    ]
    return {
        "state": {order[name]: merged[name] for name in sorted(merged, key=order.__getitem__)},
        "param_groups": groups,
    }
