"""Saving and loading as Lightning asks for it in a run, in the format that was chosen; either format is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.optim import Optimizer

from lightning_effi.checkpoint import full, sharded
from lightning_effi.compat import lightning as lightning_compat
from lightning_effi.pipeline_parallel import checkpoint as stage_checkpoint

if TYPE_CHECKING:
    from lightning_effi.strategy import EffiStrategy

_MEETING_TIME = timedelta(seconds=8)


class RunCheckpoint:
    """The checkpoint methods of a strategy."""

    def __init__(self, strategy: EffiStrategy) -> None:
        self._strategy = strategy
        self._loaded_directory: Path | None = None

    @property
    def _is_sharded(self) -> bool:
        return self._strategy.config.checkpoints.format == "sharded"

    def model_state(self) -> dict[str, Any]:
        """``full``: everything on rank zero. ``sharded``: each rank's own part. All ranks must call this."""
        module = self._strategy.lightning_module
        assert module is not None
        self._meet_after_error()
        self._settle()
        if self._is_sharded:
            return module.state_dict()
        if stages := self._strategy.assembly.stages:
            return stage_checkpoint.gather_model(module, stages)
        return full.gather_model(module, keep=self._strategy.is_global_zero)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """As :meth:`model_state`; in the ``full`` format it is what stock Lightning saves."""
        self._settle()
        optimizer = lightning_compat.unwrap_lightning_optimizer(optimizer)
        if (stages := self._strategy.assembly.stages) and not self._is_sharded:
            index = next(i for i, own in enumerate(self._strategy.optimizers) if own is optimizer)
            return stage_checkpoint.gather_optimizer(
                optimizer, self._strategy.assembly.pipeline.optimizer_names[index], stages
            )
        state = optimizer.state_dict()
        return state if self._is_sharded else full.gather_full(state, keep=self._strategy.is_global_zero)

    def save(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None) -> None:
        """Write a checkpoint that Lightning has put together from the two methods above."""
        strategy = self._strategy
        if not self._is_sharded:
            if strategy.is_global_zero:
                with sharded.moved_aside(Path(filepath)):
                    strategy.checkpoint_io.save_checkpoint(checkpoint, filepath, storage_options=storage_options)
            return
        if storage_options is not None:
            raise TypeError("storage_options are not used with checkpoints='sharded', which writes a directory itself")
        module = strategy.lightning_module
        assert module is not None
        sharded.save(
            Path(strategy.broadcast(str(filepath))),
            checkpoint,
            strategy.optimizers,
            module,
            is_first_rank=strategy.is_global_zero,
            barrier=strategy.barrier,
            merge=self._merge_stages if strategy.assembly.stages else None,
        )

    def _merge_stages(self, tensors: dict[str, Any], rest: dict[str, Any]) -> None:
        assembly = self._strategy.assembly
        assert assembly.stages is not None
        stage_checkpoint.merge_stages(tensors, rest, assembly.pipeline.optimizer_names, assembly.stages)

    def load(self, path: Path, weights_only: bool | None) -> dict[str, Any]:
        """Read a checkpoint of either format; tensors of a directory are read later, where they are needed."""
        path = Path(self._strategy.broadcast(str(path)))
        if sharded.is_sharded_checkpoint(path):
            self._loaded_directory = path
            return sharded.load(path, weights_only)
        self._loaded_directory = None
        if path.is_dir():
            raise ValueError(f"'{path}' is a directory, but not a complete checkpoint of this package")
        if path.is_file():
            return full.load_file(path, weights_only)
        return self._strategy.checkpoint_io.load_checkpoint(path, weights_only=weights_only)

    def load_model(self, checkpoint: Mapping[str, Any], strict: bool) -> None:
        """Fill the module, sharded or not."""
        module = self._strategy.lightning_module
        assert module is not None
        self._settle()
        state = checkpoint["state_dict"]
        if self._strategy.assembly.stages:  # what did not fit into one process is still split: each takes its part
            state = stage_checkpoint.of_this_stage(module, state, is_directory=self._loaded_directory is not None)
        if self._loaded_directory is not None:
            sharded.load_model(self._loaded_directory, module, state, strict)
        else:
            full.load_model(module, state, strict)

    def load_optimizers(self, checkpoint: Mapping[str, Any]) -> None:
        """Fill the optimizers, whose parameters are sharded by now."""
        module = self._strategy.lightning_module
        assert module is not None
        states = checkpoint["optimizer_states"]
        optimizers = self._strategy.optimizers
        if len(states) != len(optimizers):
            raise ValueError(f"the checkpoint has {len(states)} optimizers, this run has {len(optimizers)}")
        states = self._of_this_stage(states)
        if self._loaded_directory is not None:
            sharded.load_optimizers(self._loaded_directory, optimizers, states, module)
            return
        for optimizer, state in zip(optimizers, states, strict=True):
            full.load_optimizer(optimizer, state)

    def _of_this_stage(self, states: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
        """What is loaded into a module that is split already, as LearningRateFinder does: each stage takes its part."""
        assembly = self._strategy.assembly
        if (stages := assembly.stages) is None:
            return states
        if self._loaded_directory is not None:
            return [stage_checkpoint.entry_of_this_stage(entry, stages) for entry in states]
        return [
            stage_checkpoint.optimizer_of_this_stage(state, names, stages)
            for state, names in zip(states, assembly.pipeline.optimizer_names, strict=True)
        ]

    def _meet_after_error(self) -> None:
        """A callback may save when a rank has failed; gathering shards would then wait for ranks that never come.

        Raises:
            RuntimeError: where they are not all here within seconds.
        """
        strategy = self._strategy
        if strategy.assembly.exists and strategy.has_several_processes and strategy.is_interrupted:
            try:
                dist.monitored_barrier(strategy.run_control_group, timeout=_MEETING_TIME)
            except RuntimeError as error:
                raise RuntimeError(
                    "no checkpoint was written after the error, since not all ranks came to save their shards"
                ) from error

    def _settle(self) -> None:
        """Shards must be the live parameters, and buffers those of the first rank."""
        if self._strategy.assembly.exists:
            self._strategy.engine.rest()
            self._strategy.engine.sync_buffers()
