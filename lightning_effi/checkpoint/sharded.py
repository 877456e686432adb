"""The ``sharded`` format: a directory to which every rank writes its own shards (torch's DCP).

Tensors go to DCP under ``model.<name>`` and ``optimizer.<index>.<parameter name>.<state>``; everything else goes to
one small file, ``trainer.pt``. The directory is written under a temporary name and renamed when it is complete, so
that a directory of the right name is always a whole checkpoint.
"""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_effi.checkpoint.full import tied_names
from lightning_effi.compat import lightning as lightning_compat

TRAINER_FILE = "trainer.pt"
_UNFINISHED = ".unfinished"


def is_sharded_checkpoint(path: Path) -> bool:
    """Whether ``path`` is a directory written by :func:`save`."""
    return path.is_dir() and (path / TRAINER_FILE).is_file() and (path / ".metadata").is_file()


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
        rest["optimizer_states"] = [
            _split_optimizer(index, optimizer, names, tensors) for index, optimizer in enumerate(optimizers)
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
    """Read everything but the tensors; ``state_dict`` still holds names, see :func:`load_model`."""
    return torch.load(path / TRAINER_FILE, map_location="cpu", weights_only=weights_only is not False)


def load_model(path: Path, module: nn.Module, saved: Mapping[str, Any], strict: bool) -> None:
    """Fill ``module`` (intact or sharded) from the directory, each rank reading only what it holds."""
    current = module.state_dict()
    sources = saved["tensors"]
    wanted = {key: source for key, source in sources.items() if key in current}
    targets = {f"model.{source}": torch.empty_like(current[key], device=_device(current[key]))
               for key, source in wanted.items()}  # fmt: skip
    _read(path, targets)
    state: dict[str, Any] = {key: targets[f"model.{source}"] for key, source in wanted.items()}
    # what only one side has is left to load_state_dict, which names it
    state.update({key: torch.empty(0) for key in sources if key not in current})
    state.update(saved["others"])
    on_meta = any(isinstance(value, Tensor) and value.is_meta for value in current.values())
    module.load_state_dict(state, strict=strict, assign=on_meta)


def load_optimizers(
    path: Path, optimizers: Sequence[Optimizer], saved: Sequence[Mapping[str, Any]], module: nn.Module
) -> None:
    """Fill the optimizers' states from the directory, each rank reading only its shards."""
    parameters = dict(module.named_parameters())
    for index, (optimizer, entry) in enumerate(zip(optimizers, saved, strict=True)):
        targets: dict[str, Tensor] = {}
        state: dict[int, dict[str, Any]] = {}
        positions = {name: position for position, name in enumerate(n for g in entry["names"] for n in g)}
        for name, keys in entry["tensors"].items():
            parameter = parameters[name]
            for key, (shape, dtype) in keys.items():
                target = _empty_state(parameter, tuple(shape), dtype)
                targets[f"optimizer.{index}.{name}.{key}"] = target
                state.setdefault(positions[name], {})[key] = target
        _read(path, targets)
        for name, values in entry["others"].items():
            state.setdefault(positions[name], {}).update(values)
        groups = [
            {**options, "params": [positions[name] for name in names]}
            for options, names in zip(entry["groups"], entry["names"], strict=True)
        ]
        optimizer.load_state_dict({"state": state, "param_groups": groups})


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
    index: int, optimizer: Optimizer, names: dict[int, str], tensors: dict[str, Any]
) -> dict[str, Any]:
    optimizer = lightning_compat.unwrap_lightning_optimizer(optimizer)
    described: dict[str, dict[str, Any]] = {}
    others: dict[str, dict[str, Any]] = {}
    for parameter, entries in optimizer.state.items():
        name = names[id(parameter)]
        for key, value in entries.items():
            if isinstance(value, Tensor):
                tensors[f"optimizer.{index}.{name}.{key}"] = value
                described.setdefault(name, {})[key] = (tuple(value.shape), value.dtype)
            else:
                others.setdefault(name, {})[key] = value
    return {
        "tensors": described,
        "others": others,
        "names": [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups],
        "groups": [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups],
    }


def _empty_state(parameter: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    if shape == tuple(parameter.shape):
        return torch.empty_like(parameter, dtype=dtype).detach()
    return torch.empty(shape, dtype=dtype)


def _device(tensor: Tensor) -> torch.device:
    return torch.device("cpu") if tensor.is_meta else tensor.device


def _read(path: Path, targets: dict[str, Tensor]) -> None:
    import torch.distributed.checkpoint as dcp

    if targets:
        alone = not (dist.is_available() and dist.is_initialized())
        dcp.load(targets, storage_reader=_safe_reader(path), no_dist=alone)


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


class _MetadataUnpickler(pickle.Unpickler):
    """DCP's ``.metadata`` is a pickle: allow what describes tensors, and nothing else."""

    _MODULES = (
        "torch.distributed.checkpoint.metadata",
        "torch.distributed.checkpoint.filesystem",
        "torch.distributed.checkpoint.planner",
    )
    _NAMES = frozenset(
        {
            ("torch", "Size"),
            ("torch", "device"),
            ("torch.serialization", "_get_layout"),
            ("collections", "OrderedDict"),
            ("pathlib", "PosixPath"),
            ("pathlib", "Path"),
            ("builtins", "set"),
            ("builtins", "frozenset"),
        }
    )

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if module in self._MODULES or (module, name) in self._NAMES or is_dtype:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"a checkpoint's .metadata must not contain {module}.{name}")


def _safe_reader(path: Path) -> Any:
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

    class SafeReader(FileSystemReader):
        def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
            with (path / ".metadata").open("rb") as file:
                metadata = _MetadataUnpickler(file).load()
            if getattr(metadata, "storage_meta", None) is None:
                metadata.storage_meta = StorageMeta()
            metadata.storage_meta.load_id = self.load_id
            return metadata

    return SafeReader(path)
