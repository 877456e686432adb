"""The ``sharded`` format: a directory to which every rank writes its own shards (torch's DCP).

Tensors go to DCP under ``model.<name>`` and ``optimizer.<index>.<parameter name>.<state>``; everything else goes to
one small file, ``trainer.pt``. The directory is written under a temporary name and renamed when it is complete, so
that a directory of the right name is always a whole checkpoint.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_effi.checkpoint.directory import METADATA_FILE, Directory
from lightning_effi.checkpoint.full import tied_names
from lightning_effi.checkpoint.stored import stored_tensor
from lightning_effi.compat import lightning as lightning_compat

TRAINER_FILE = "trainer.pt"
_UNFINISHED = ".unfinished"


def is_sharded_checkpoint(path: Path) -> bool:
    """Whether ``path`` is a directory written by :func:`save`."""
    return path.is_dir() and (path / TRAINER_FILE).is_file() and (path / METADATA_FILE).is_file()


def save(
    path: Path,
    checkpoint: dict[str, Any],
    optimizers: Sequence[Optimizer],
    module: nn.Module,
    *,
    is_first_rank: bool,
    barrier: Callable[[], None],
    merge: Callable[[dict[str, Any], dict[str, Any]], None] | None = None,
) -> None:
    """Write ``checkpoint`` (Lightning's, with DTensors in it) to the directory ``path``; all ranks must call this.

    Args:
        path: of the directory.
        checkpoint: what Lightning has put together; its tensors are this rank's own.
        optimizers: whose states are saved, if the checkpoint has any.
        module: whose parameters they hold.
        is_first_rank: whether this rank writes what is not a tensor.
        barrier: over all ranks.
        merge: where ranks hold different parameters, ``(tensors, rest)`` is changed in place so that each tensor is
            written once and ``rest`` tells of those of all ranks.
    """
    import torch.distributed.checkpoint as dcp

    rest = dict(checkpoint)
    tensors, rest["state_dict"] = _split_model(rest["state_dict"], tied_names(module))
    if "optimizer_states" in rest:
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        states = rest["optimizer_states"]
        if states and len(states) != len(optimizers):
            raise ValueError(f"the checkpoint has {len(states)} optimizer states, this run has {len(optimizers)}")
        rest["optimizer_states"] = [
            _split_optimizer(index, optimizer, state, names, tensors)
            for index, (optimizer, state) in enumerate(zip(optimizers, states, strict=False))
        ]
    if merge is not None:
        merge(tensors, rest)
    unfinished = path.with_name(path.name + _UNFINISHED)
    if is_first_rank:
        _remove(unfinished)
        unfinished.mkdir(parents=True)
        torch.save(rest, unfinished / TRAINER_FILE)
    barrier()
    dcp.save(tensors, checkpoint_id=unfinished)
    barrier()
    if is_first_rank:
        _replace(unfinished, path)
    barrier()


def load(path: Path, weights_only: bool | None) -> dict[str, Any]:
    """As Lightning's own, with tensors whose values have not been read (:func:`stored_tensor`).

    Raises:
        ValueError: naming the file that cannot be read, or does not fit the others.
    """
    directory, file = Directory(path), path / TRAINER_FILE
    try:
        checkpoint = torch.load(file, map_location="cpu", weights_only=weights_only is not False)
        described = checkpoint["state_dict"]
        checkpoint["state_dict"] = {
            key: stored_tensor(directory, f"model.{source}") for key, source in described["tensors"].items()
        } | described["others"]
        if "optimizer_states" in checkpoint:
            checkpoint["optimizer_states"] = [
                _join_optimizer(directory, index, entry) for index, entry in enumerate(checkpoint["optimizer_states"])
            ]
    except Exception as error:  # what was tampered with raises anything
        raise ValueError(f"'{file}' cannot be read: {error}") from error
    return checkpoint


def _join_optimizer(directory: Directory, index: int, entry: Mapping[str, Any]) -> dict[str, Any]:
    """The state dict of an optimizer from what :func:`_split_optimizer` wrote."""
    positions = {name: position for position, name in enumerate(name for names in entry["names"] for name in names)}
    state: dict[int, dict[str, Any]] = {}
    for name, keys in entry["tensors"].items():
        found = {key: stored_tensor(directory, f"optimizer.{index}.{name}.{key}") for key in keys}
        state.setdefault(positions[name], {}).update(found)
    for name, values in entry["others"].items():
        state.setdefault(positions[name], {}).update(values)
    groups = [
        {**options, "params": [positions[name] for name in names]}
        for options, names in zip(entry["groups"], entry["names"], strict=True)
    ]
    return {"state": {position: state[position] for position in sorted(state)}, "param_groups": groups}


def _split_model(state: Mapping[str, Any], tied: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Tensors under DCP keys, and a description from which the state dict can be put together again."""
    tensors: dict[str, Any] = {}
    sources: dict[str, str] = {}
    others: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, Tensor):
            sources[key] = tied[key] if tied.get(key) in state else key
            tensors[f"model.{sources[key]}"] = value
        else:
            others[key] = value
    return tensors, {"tensors": sources, "others": others}


def _split_optimizer(
    index: int, optimizer: Optimizer, state: Mapping[str, Any], names: dict[int, str], tensors: dict[str, Any]
) -> dict[str, Any]:
    """As :func:`_split_model`, of the state dict that the checkpoint has: hooks may have changed it."""
    optimizer = lightning_compat.unwrap_lightning_optimizer(optimizer)
    by_group = [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]
    by_position = [name for group in by_group for name in group]
    described: dict[str, dict[str, Any]] = {}
    others: dict[str, dict[str, Any]] = {}
    for position, entries in state["state"].items():
        name = by_position[position]
        for key, value in entries.items():
            if isinstance(value, Tensor):
                tensors[f"optimizer.{index}.{name}.{key}"] = value
                described.setdefault(name, {})[key] = (tuple(value.shape), value.dtype)
            else:
                others.setdefault(name, {})[key] = value
    return {
        "tensors": described,
        "others": others,
        "names": by_group,
        "groups": [{k: v for k, v in group.items() if k != "params"} for group in state["param_groups"]],
    }


def _replace(unfinished: Path, path: Path) -> None:
    """Put the finished directory in place; an older checkpoint of that name stays until the moment before."""
    with moved_aside(path, also_files=True):
        unfinished.rename(path)


@contextmanager
def moved_aside(path: Path, also_files: bool = False) -> Iterator[None]:
    """Make room for a new checkpoint under a name that a directory has; the old one comes back if writing fails."""
    if not (path.is_dir() or (also_files and path.exists())):
        yield
        return
    old = path.with_name(path.name + ".old")
    _remove(old)
    path.rename(old)
    try:
        yield
    except BaseException:
        _remove(path)
        old.rename(path)
        raise
    _remove(old)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
