"""Efficient training of transformers in PyTorch Lightning by configuration alone.

Importing this package registers the strategies ``effi``, ``effi_zero0`` to ``effi_zero3``, and layouts by name:
``effi_tp2``, ``effi_pp2``, ``effi_tp2_pp2`` and so on.
"""

from lightning.pytorch.strategies import StrategyRegistry

from lightning_effi.callbacks import HealthCheck
from lightning_effi.config import (
    ActivationCheckpointing,
    Checkpoints,
    Microbatches,
    OptimizerStates,
    Pipeline,
    TensorParallel,
)
from lightning_effi.layout import Layout
from lightning_effi.precision import EffiPrecision
from lightning_effi.strategy import EffiStrategy

__version__ = "0.1.0"

EffiStrategy.register_strategies(StrategyRegistry)

__all__ = [
    "ActivationCheckpointing",
    "Checkpoints",
    "EffiPrecision",
    "EffiStrategy",
    "HealthCheck",
    "Layout",
    "Microbatches",
    "OptimizerStates",
    "Pipeline",
    "TensorParallel",
    "__version__",
]
