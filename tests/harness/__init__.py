"""Multi-process tests in milliseconds, and the comparison of a parallel run with the single-process one.

``run_distributed(fn, world_size, *args)`` runs a function on several ranks; ``run_training(...)`` trains a module under
a strategy; ``train_and_assert_parity(Training(...))`` does so and compares with the stock single-process Trainer.
"""

from tests.harness.environment import WorkerEnvironment
from tests.harness.parity import ADAMW_FP64, SGD_FP32, Bounds, assert_parity, train_and_assert_parity
from tests.harness.pool import WorkerError, WorkerTimeout, close_pool, end_shared_workers, run_distributed, run_isolated
from tests.harness.record import TrainingRecord, full_parameters, full_tensor
from tests.harness.training import BatchList, Training, make_trainer, run, run_reference, run_training

__all__ = [
    "ADAMW_FP64",
    "SGD_FP32",
    "BatchList",
    "Bounds",
    "Training",
    "TrainingRecord",
    "WorkerEnvironment",
    "WorkerError",
    "WorkerTimeout",
    "assert_parity",
    "close_pool",
    "end_shared_workers",
    "full_parameters",
    "full_tensor",
    "make_trainer",
    "run",
    "run_distributed",
    "run_isolated",
    "run_reference",
    "run_training",
    "train_and_assert_parity",
]
