"""Checkpoints of a module whose parameters lie on several stages.

A full one is gathered, by name, on the first stage. To a sharded one each stage writes its own tensors; of copies, the
first holder's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lightning_effi.checkpoint import full
from lightning_effi.comm.gather import gather_full
from lightning_effi.pipeline_parallel.stage_parameters import StageParameters


def gather_model(module: nn.Module, stages: StageParameters) -> dict[str, Any]:
    """The state dict of the whole module on the first stage, ``{}`` elsewhere; all ranks must call this."""
    saves = stages.saves()
    state = full.gather_model(module, keep=True)
    everywhere = stages.gather((state, [key for key in state if saves(key)]))
    merged: dict[str, Any] = {}
    for each, _ in reversed(everywhere):
        merged.update(each)
    for each, saved in everywhere:
        merged.update({key: each[key] for key in saved})
    return {key: merged[key] for key in stages.state_keys if key in merged}


def gather_optimizer(optimizer: Optimizer, index: int, stages: StageParameters) -> dict[str, Any]:
    """The optimizer's state dict as the whole module's optimizer would give it, on the first stage.

    Args:
        optimizer: of this stage.
        index: its place among the optimizers.
        stages: of the pipeline.
    """
    names = stages.optimizer_names[index]
    state = gather_full(optimizer.state_dict(), keep=True)
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


def merge_stages(stages: StageParameters, tensors: dict[str, Any], rest: dict[str, Any]) -> None:
    """Complete what :func:`lightning_effi.checkpoint.sharded.save` found on one stage; every rank must call this.

    Args:
        stages: of the pipeline.
        tensors: by key, ``model.<name>`` or ``optimizer.<index>.<name>.<state>``; those of other stages are taken out.
        rest: what is not a tensor, and the names of the tensors of this stage; those of all stages on the first.
    """
    described = {key: rest[key] for key in ("state_dict", "optimizer_states") if key in rest}
    saves = stages.saves()
    for key in [key for key in tensors if not saves(_name_in(key))]:
        del tensors[key]
    everywhere = stages.gather(described)
    if not everywhere:
        return
    sources = {key: name for each in reversed(everywhere) for key, name in each["state_dict"]["tensors"].items()}
    others = {key: value for each in reversed(everywhere) for key, value in each["state_dict"]["others"].items()}
    rest["state_dict"] = {
        "tensors": {key: sources[key] for key in stages.state_keys if key in sources},
        "others": others,
    }
    for index, entry in enumerate(rest.get("optimizer_states", ())):
        parts = [each["optimizer_states"][index] for each in reversed(everywhere)]
        rest["optimizer_states"][index] = {
            **entry,
            "tensors": {name: found for part in parts for name, found in part["tensors"].items()},
            "others": {name: found for part in parts for name, found in part["others"].items()},
            "names": stages.optimizer_names[index],
        }


def of_this_stage(module: nn.Module, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a whole module's ``state_dict`` that a split module holds here."""
    held = module.state_dict().keys()
    return {key: value for key, value in state.items() if key in held}


def optimizer_of_this_stage(
    state: Mapping[str, Any], names: Sequence[Sequence[str]], stages: StageParameters
) -> dict[str, Any]:
    """The part of a whole optimizer's state dict that the optimizer of this stage holds.

    Args:
        state: as :func:`gather_optimizer` gives it, or a stock optimizer.
        names: of all parameters of each group, in the order before the split.
        stages: of the pipeline.

    Raises:
        ValueError: where the state is that of other groups.
    """
    groups = []
    if [len(group["params"]) for group in state["param_groups"]] != [len(group) for group in names]:
        raise ValueError(
            f"the checkpoint's optimizer has groups of {[len(group['params']) for group in state['param_groups']]}"
            f" parameters, this one has {[len(group) for group in names]}: was it saved by another"
            " configure_optimizers?"
        )
    for group, everything in zip(state["param_groups"], names, strict=True):
        mine = [at for at, name in zip(group["params"], everything, strict=True) if name in stages.local]
        groups.append({**group, "params": mine})
    held = {position for group in groups for position in group["params"]}
    return {**state, "state": {k: v for k, v in state["state"].items() if k in held}, "param_groups": groups}


def _name_in(key: str) -> str:
    """The name of a parameter or buffer in a key of a sharded checkpoint."""
    kind, _, name = key.partition(".")
    return name if kind == "model" else name.partition(".")[2].rpartition(".")[0]
