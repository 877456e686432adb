"""Saving and loading as Lightning asks for it in a run, in the format that was chosen; either format is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.optim import Optimizer

from lightning_effi.checkpoint import full, sharded, stages
from lightning_effi.comm.gather import gather_full
from lightning_effi.compat import lightning as lightning_compat

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from lightning.fabric.plugins import CheckpointIO

    from lightning_effi.config import Checkpoints
    from lightning_effi.context import RunContext
    from lightning_effi.data_parallel.engine import Engine
    from lightning_effi.pipeline_parallel.stage_parameters import StageParameters

_MEETING_TIME = timedelta(seconds=8)


@dataclass(frozen=True)
class Held:
    """What a rank saves and loads.

    Attributes:
        context: of the run.
        module: sharded, split or whole.
        engine: of its parameters; ``None`` before the module has been set up.
        stages: the pipeline's, where the module has been split.
    """

    context: RunContext
    module: pl.LightningModule
    engine: Engine | None
    stages: StageParameters | None

    @property
    def optimizers(self) -> list[Optimizer]:
        return self.module.trainer.optimizers

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

    def __init__(self, settings: Checkpoints, broadcast: Callable[[str], str], barrier: Callable[[], None]) -> None:
        self._is_sharded = settings.format == "sharded"
        self._broadcast = broadcast
        self._barrier = barrier
        self._loaded_directory: Path | None = None

    def model_state(self, held: Held, *, after_error: bool) -> dict[str, Any]:
        """``full``: everything on rank zero. ``sharded``: each rank's own part. All ranks must call this."""
        if after_error:
            _meet(held)
        held.settle()
        if self._is_sharded:
            return held.module.state_dict()
        if held.stages is not None:
            return stages.gather_model(held.module, held.stages)
        return full.gather_model(held.module, keep=held.context.is_first_rank)

    def optimizer_state(self, held: Held, optimizer: Optimizer) -> dict[str, Any]:
        """As :meth:`model_state`; in the ``full`` format it is what stock Lightning saves."""
        held.settle()
        optimizer = lightning_compat.unwrap_lightning_optimizer(optimizer)
        if held.stages is not None and not self._is_sharded:
            index = next(i for i, own in enumerate(held.optimizers) if own is optimizer)
            return stages.gather_optimizer(optimizer, index, held.stages)
        state = optimizer.state_dict()
        return state if self._is_sharded else gather_full(state, keep=held.context.is_first_rank)

    def save(
        self, held: Held, checkpoint: dict[str, Any], filepath: Any, io: CheckpointIO, storage_options: Any | None
    ) -> None:
        """Write a checkpoint that Lightning has put together from the two methods above."""
        if not self._is_sharded:
            if held.context.is_first_rank:
                with sharded.moved_aside(Path(filepath)):
                    io.save_checkpoint(checkpoint, filepath, storage_options=storage_options)
            return
        if storage_options is not None:
            raise TypeError("storage_options are not used with checkpoints='sharded', which writes a directory itself")
        sharded.save(
            Path(self._broadcast(str(filepath))),
            checkpoint,
            held.optimizers,
            held.module,
            is_first_rank=held.context.is_first_rank,
            barrier=self._barrier,
            merge=None if held.stages is None else partial(stages.merge_stages, held.stages),
        )

    def load(self, path: Path, io: CheckpointIO, weights_only: bool | None) -> dict[str, Any]:
        """Read a checkpoint of either format; tensors of a directory are read later, where they are needed."""
        path = Path(self._broadcast(str(path)))
        if sharded.is_sharded_checkpoint(path):
            self._loaded_directory = path
            return sharded.load(path, weights_only)
        self._loaded_directory = None
        if path.is_dir():
            raise ValueError(f"'{path}' is a directory, but not a complete checkpoint of this package")
        if path.is_file():
            return full.load_file(path, weights_only)
        return io.load_checkpoint(path, weights_only=weights_only)

    def load_model(self, held: Held, checkpoint: Mapping[str, Any], strict: bool) -> None:
        """Fill the module, sharded or not."""
        held.settle()
        state = checkpoint["state_dict"]
        if held.stages is not None:  # what did not fit into one process is still split: each takes its part
            state = stages.of_this_stage(held.module, state, is_directory=self._loaded_directory is not None)
        if self._loaded_directory is not None:
            sharded.load_model(self._loaded_directory, held.module, state, strict)
        else:
            full.load_model(held.module, state, strict)

    def load_optimizers(self, held: Held, checkpoint: Mapping[str, Any]) -> None:
        """Fill the optimizers, whose parameters are sharded by now."""
        states, optimizers = checkpoint["optimizer_states"], held.optimizers
        if len(states) != len(optimizers):
            raise ValueError(f"the checkpoint has {len(states)} optimizers, this run has {len(optimizers)}")
        states = self._of_this_stage(held, states)
        if self._loaded_directory is not None:
            sharded.load_optimizers(self._loaded_directory, optimizers, states, held.module)
            return
        for optimizer, state in zip(optimizers, states, strict=True):
            full.load_optimizer(optimizer, state)

    def _of_this_stage(self, held: Held, states: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
        """What is loaded into a module that is split already, as LearningRateFinder does: each stage takes its part."""
        if held.stages is None:
            return states
        if self._loaded_directory is not None:
            return [stages.entry_of_this_stage(entry, held.stages) for entry in states]
        names = held.stages.optimizer_names
        return [
            stages.optimizer_of_this_stage(state, each, held.stages) for state, each in zip(states, names, strict=True)
        ]


def _meet(held: Held) -> None:
    """A callback may save when a rank has failed; gathering shards would then wait for ranks that never come.

    Raises:
        RuntimeError: where they are not all here within seconds.
    """
    if held.engine is not None and held.context.has_several_processes:
        try:
            dist.monitored_barrier(held.context.groups.run.control, timeout=_MEETING_TIME)
        except RuntimeError as error:
            raise RuntimeError(
                "no checkpoint was written after the error, since not all ranks came to save their shards"
            ) from error
