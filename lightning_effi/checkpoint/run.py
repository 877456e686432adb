"""Saving and loading as Lightning asks for it in a run, in the format that was chosen; either format is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from lightning_effi.checkpoint import entries, full, sharded, stages
from lightning_effi.checkpoint.stored import read_model, read_optimizers
from lightning_effi.checkpoint.whole_modules import WholeModules
from lightning_effi.comm.agreement import Agreement
from lightning_effi.comm.gather import gather_full
from lightning_effi.compat import lightning as lightning_compat
from lightning_effi.sharded_tensors.wholes import is_sharded_tensor

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from lightning.fabric.plugins import CheckpointIO

    from lightning_effi.config import Checkpoints
    from lightning_effi.context import RunContext
    from lightning_effi.data_parallel.engine import Engine
    from lightning_effi.pipeline_parallel.stage_parameters import StageParameters

T = TypeVar("T")

_MEETING_TIME = timedelta(seconds=8)


@dataclass(frozen=True)
class Held:
    """What a rank saves and loads.

    Attributes:
        context: of the run; ``None`` in a process that started others and was not one of them, as a notebook does.
        module: sharded, split or whole.
        engine: of its parameters; ``None`` before the module has been set up.
        stages: the pipeline's, where the module has been split.
        optimizers: none in a process without a run.
    """

    context: RunContext | None
    module: pl.LightningModule
    engine: Engine | None
    stages: StageParameters | None
    optimizers: list[Optimizer]

    @property
    def is_first_rank(self) -> bool:
        """Whether this process writes files."""
        return self.context is None or self.context.is_first_rank

    @property
    def control_group(self) -> Any:
        """All ranks; ``None`` where there is only this one."""
        return None if self.context is None else self.context.groups.run.control

    def settle(self) -> None:
        """Shards must be the live parameters, and buffers those of the first rank."""
        if self.engine is not None:
            self.engine.rest()
            self.engine.sync_buffers()


class RunCheckpoint:
    """The checkpoint methods of a strategy.

    Args:
        settings: the format that is written.
        broadcast: gives every rank the first one's object.
        barrier: over all ranks.
    """

    def __init__(self, settings: Checkpoints, broadcast: Callable[[Any], Any], barrier: Callable[[], None]) -> None:
        self._is_sharded = settings.format == "sharded"
        self._whole: WholeModules | None = None
        self._broadcast = broadcast
        self._barrier = barrier

    def remember(self, module: nn.Module) -> None:
        """Before ``module`` is set up: hyper-parameters may hold parts of it, which checkpoints hold as they are."""
        self._whole = WholeModules(module)

    def model_state(self, held: Held, *, after_error: bool) -> dict[str, Any]:
        """``full``: everything on rank zero. ``sharded``: each rank's own part. All ranks must call this."""
        if after_error:
            _meet(held)
        elif held.stages is not None or (held.engine is not None and held.engine.is_sharded):
            dist.barrier(held.control_group)  # whoever comes alone stays here, in no message that others take part in
        held.settle()
        return held.module.state_dict() if self._is_sharded else self._gathered(held)

    def _gathered(self, held: Held) -> dict[str, Any]:
        if held.stages is not None:
            return stages.gather_model(held.module, held.stages)
        return full.gather_model(held.module, keep=held.is_first_rank)

    def optimizer_state(self, held: Held, optimizer: Optimizer) -> dict[str, Any]:
        """As :meth:`model_state`; in the ``full`` format it is what stock Lightning saves."""
        held.settle()
        optimizer = lightning_compat.unwrap_lightning_optimizer(optimizer)
        if held.stages is not None and not self._is_sharded:
            index = next(i for i, own in enumerate(held.optimizers) if own is optimizer)
            return stages.gather_optimizer(optimizer, index, held.stages)
        state = optimizer.state_dict()
        return state if self._is_sharded else gather_full(state, keep=held.is_first_rank)

    def save(
        self, held: Held, checkpoint: dict[str, Any], filepath: Any, io: CheckpointIO, storage_options: Any | None
    ) -> None:
        """Write a checkpoint that Lightning has put together from the two methods above."""
        if held.stages is not None:
            entries.complete(checkpoint, held.stages)
        checkpoint, local = self._with_whole_modules(held, checkpoint), local_path(filepath)
        if not self._is_sharded:
            checkpoint = _with_whole_tensors(held, checkpoint)
            if held.is_first_rank:
                with nullcontext() if local is None else sharded.moved_aside(local):
                    io.save_checkpoint(checkpoint, filepath, storage_options=storage_options)
            return
        if storage_options is not None:
            raise TypeError("storage_options are not used with checkpoints='sharded', which writes a directory itself")
        sharded.save(
            _mounted(self._broadcast(str(filepath))),
            checkpoint,
            held.optimizers,
            held.module,
            is_first_rank=held.is_first_rank,
            barrier=self._barrier,
            merge=None if held.stages is None else partial(stages.merge_stages, held.stages),
        )

    def _with_whole_modules(self, held: Held, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """With plain modules where it holds modules that are at work; a directory has their values elsewhere."""
        whole = self._whole
        if whole is None or held.engine is None:
            return checkpoint
        if not self._broadcast(held.is_first_rank and whole.found_in(checkpoint)):
            return checkpoint
        values = {} if self._is_sharded else self._gathered(held)
        return whole.replaced(checkpoint, values) if held.is_first_rank else checkpoint

    def refuse_remote(self, trainer: pl.Trainer) -> None:
        """Before the run: where a callback is going to save to a place that the format cannot write to."""
        if self._is_sharded:
            for callback in trainer.checkpoint_callbacks:
                if folder := getattr(callback, "dirpath", None):
                    _mounted(folder)

    def load(self, path: Any, io: CheckpointIO, weights_only: bool | None, group: Any) -> dict[str, Any]:
        """Read a checkpoint of either format; tensors of a directory are read later, where they are needed.

        Args:
            path: or URL.
            io: reads what is not a directory.
            weights_only: ``False`` is the caller's word that code in the file may run.
            group: all ranks, with a backend for objects; ``None`` without process groups.
        """
        path = self._broadcast(str(path))
        local = local_path(path)
        if local is not None and sharded.is_sharded_checkpoint(local):
            return _agreed(group, lambda: sharded.load(local, weights_only))
        if local is not None and local.is_dir() and type(io) is TorchCheckpointIO:
            raise ValueError(f"'{path}' is a directory, but not a complete checkpoint of this package")
        if local is not None and local.is_file() and type(io) is TorchCheckpointIO:
            return full.load_file(local, weights_only)
        if isinstance(io, (TorchCheckpointIO, AsyncCheckpointIO)):  # from some places they would read code as well
            weights_only = weights_only is not False
        return io.load_checkpoint(path, weights_only=weights_only)

    def load_model(self, held: Held, checkpoint: Mapping[str, Any], strict: bool) -> None:
        """Fill the module, sharded or not."""
        held.settle()
        state = checkpoint["state_dict"]
        if held.stages is not None:  # what did not fit into one process is still split: each takes its part
            state = stages.of_this_stage(held.module, state)
        read = _agreed(held.control_group, lambda: read_model(state, held.module.state_dict()))
        full.load_model(held.module, read, strict)
        if held.stages is not None:
            held.stages.common.note()

    def load_optimizers(self, held: Held, checkpoint: Mapping[str, Any]) -> None:
        """Fill the optimizers, whose parameters are sharded by now; none where a hook has taken their states out."""
        states, optimizers = checkpoint["optimizer_states"], held.optimizers
        if not states:
            if optimizers:
                rank_zero_info("lightning_effi: the checkpoint has no optimizer states, so the optimizers start afresh")
            return
        if len(states) != len(optimizers):
            raise ValueError(f"the checkpoint has {len(states)} optimizers, this run has {len(optimizers)}")
        states = self._of_this_stage(held, states)
        own = [full.by_position(optimizer, state) for optimizer, state in zip(optimizers, states, strict=True)]
        read = _agreed(held.control_group, lambda: read_optimizers(states, own))
        for optimizer, state in zip(optimizers, read, strict=True):
            full.load_optimizer(optimizer, state)

    def _of_this_stage(self, held: Held, states: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
        """What is loaded into a module that is split already, as LearningRateFinder does: each stage takes its part."""
        if held.stages is None:
            return states
        names = held.stages.optimizer_names
        return [
            stages.optimizer_of_this_stage(state, each, held.stages) for state, each in zip(states, names, strict=True)
        ]


def _with_whole_tensors(held: Held, checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Without shards, of which hooks may have put some there: ModelPruning exchanges the module's state for its own.

    Raises:
        RuntimeError: where not all ranks have put them there.
    """
    count = sum(is_sharded_tensor(leaf) for leaf in tree_leaves(checkpoint))
    counts = [count] if held.control_group is None else Agreement(held.control_group).gather(count)
    if len(set(counts)) > 1:
        raise RuntimeError(
            f"on_save_checkpoint has put {max(counts)} sharded tensors into the checkpoint on rank"
            f" {counts.index(max(counts))} and {min(counts)} on rank {counts.index(min(counts))}; they can only be"
            " gathered together. Put them there on all ranks, or gather them there (tensor.full_tensor())"
        )
    return gather_full(checkpoint, keep=held.is_first_rank) if count else checkpoint


def _meet(held: Held) -> None:
    """A callback may save when a rank has failed; gathering shards would then wait for ranks that never come.

    Raises:
        RuntimeError: where they are not all here within seconds.
    """
    if held.engine is not None and held.control_group is not None:
        try:
            dist.monitored_barrier(held.control_group, timeout=_MEETING_TIME)
        except RuntimeError as error:
            raise RuntimeError(
                "no checkpoint was written after the error, since not all ranks came to save their shards"
            ) from error


def _agreed(group: Any, read: Callable[[], T]) -> T:
    """What ``read`` finds. Where it fails on any rank it fails on all of them, before anything is changed."""
    failure: ValueError | None = None
    try:
        found = read()
    except ValueError as error:
        failure = error
    if group is not None:
        for rank, message in enumerate(Agreement(group).gather(None if failure is None else str(failure))):
            if message is not None:
                raise ValueError(f"on rank {rank}: {message}") from failure
    if failure is not None:
        raise failure
    return found


def local_path(path: Any) -> Path | None:
    """The path that a path or URL has in the file system of this machine; ``None`` where it is elsewhere."""
    filesystem, stripped = url_to_fs(str(path))
    return Path(stripped) if isinstance(filesystem, LocalFileSystem) else None


def _mounted(path: Any) -> Path:
    if (local := local_path(path)) is None:
        raise ValueError(
            f"checkpoints='sharded' writes to folders that every rank has mounted, and '{path}' is none; use one,"
            " or checkpoints='full'"
        )
    return local
