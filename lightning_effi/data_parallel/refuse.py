"""What cannot work on shards, said before training starts."""

from __future__ import annotations

from collections.abc import Iterable

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelPruning, StochasticWeightAveraging, WeightAveraging
from torch.optim import Optimizer

from lightning_effi.compat import timm as timm_compat

# Couples all parameters through dot products over flattened copies, or needs sparse gradients.
_UNSHARDABLE = (torch.optim.LBFGS, torch.optim.SparseAdam)


def refuse_unshardable(optimizers: Iterable[Optimizer], setting: str) -> None:
    """Raise ``ValueError`` for optimizers that need whole parameters, which ``setting`` shards."""
    for optimizer in optimizers:
        if isinstance(optimizer, _UNSHARDABLE):
            raise ValueError(
                f"{setting} shards the parameters, and {type(optimizer).__name__} needs each of them whole. Use"
                " zero_stage=0 and tensor_parallel_size=1, or another optimizer"
            )


def refuse_compiled_for_plain(optimizers: Iterable[Optimizer], setting: str) -> None:
    """Raise ``ValueError`` for optimizers that compile products of plain parameters, which shards are not."""
    for optimizer in optimizers:
        if timm_compat.compiles_for_plain_tensors(optimizer):
            raise ValueError(
                f"{setting} shards the parameters, and {type(optimizer).__name__} compiles its products for plain"
                " tensors. Use zero_stage=0, or another optimizer"
            )


def refuse_averaging_of_shards(trainer: pl.Trainer, setting: str) -> None:
    """Raise ``ValueError`` for Lightning's averaging callbacks, which copy whole parameters onto the module's."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, (StochasticWeightAveraging, WeightAveraging)):
            raise ValueError(
                f"{type(callback).__name__} keeps a whole copy of the module and cannot average the parts that"
                f" {setting} leaves on each rank. Use zero_stage=0 without tensor and pipeline parallelism, or leave"
                " the callback out"
            )


def refuse_pruning(trainer: pl.Trainer, setting: str) -> None:
    """Raise ``ValueError`` for Lightning's ModelPruning, which exchanges parameters in the middle of the run."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, ModelPruning):
            raise ValueError(
                f"{type(callback).__name__} puts masked weights in the place of the module's parameters, of which"
                f" {setting} leaves a part on each rank. Use ZeRO alone (any zero_stage, without tensor and pipeline"
                " parallelism), or leave the callback out"
            )
