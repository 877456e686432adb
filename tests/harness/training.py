"""Train a module with a real Trainer under a strategy, and under the stock single-process Trainer on the same data."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import lightning.pytorch as pl
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from tests.harness.environment import WorkerEnvironment
from tests.harness.pool import run_distributed, run_isolated
from tests.harness.record import RankRecord, Recorder, TrainingRecord, merge

ModuleFactory = Callable[..., pl.LightningModule]
DataFactory = Callable[[int], Sequence[Any]]


@dataclass(frozen=True)
class Training:
    """A training run, complete: everything that decides its numbers.

    Attributes:
        module_factory: Makes the module. It is given ``optimizer`` and ``learning_rate`` where these are not None.
        data_factory: ``(count) -> sequence`` of whole batches, the same ones on every call.
        strategy: Arguments of ``EffiStrategy``; a string names a stock strategy; None is the stock Trainer on one
            device.
        world_size: Number of processes.
        steps: Number of optimizer steps.
        accumulate: Micro-batches per step and data-parallel rank.
        clip: ``gradient_clip_val`` of the Trainer, by ``clip_algorithm``.
        seed: Decides the initial parameters.
        trainer: Further arguments of the Trainer.
        callbacks: Factories of further callbacks; the attribute ``observation`` of each comes back in the record.
        record_tensors: Record gradients and parameters, not only numbers.
        distributed_order: Take the batches in the order in which several data-parallel ranks together would.
    """

    module_factory: ModuleFactory
    data_factory: DataFactory
    strategy: Mapping[str, Any] | str | None = None
    world_size: int = 1
    steps: int = 3
    precision: str = "32-true"
    accumulate: int = 1
    clip: float | None = None
    clip_algorithm: Literal["norm", "value"] = "norm"
    optimizer: Literal["sgd", "adamw"] | None = "sgd"
    learning_rate: float | None = None
    seed: int = 7
    trainer: Mapping[str, Any] = field(default_factory=dict)
    callbacks: tuple[Callable[[], pl.Callback], ...] = ()
    record_tensors: bool = True
    distributed_order: bool = False
    timeout: float = 60.0

    @property
    def data_parallel_size(self) -> int:
        """Number of ranks that see different data."""
        model_parallel = 1
        if isinstance(self.strategy, Mapping):
            model_parallel = self.strategy.get("tensor_parallel_size", 1) * self.strategy.get(
                "pipeline_parallel_size", 1
            )
        return self.world_size // model_parallel

    def reference(self) -> Training:
        """The same training in one process: the micro-batches of all data-parallel ranks make up its window."""
        size = self.data_parallel_size
        return replace(self, strategy=None, world_size=1, accumulate=self.accumulate * size, distributed_order=size > 1)


class BatchList(Dataset[Any]):
    """One item is one whole batch, so that the k-th batch of rank r of N is item ``k·N + r`` of the sampler's order."""

    def __init__(self, batches: Sequence[Any]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> Any:
        return self.batches[index]


def run_training(
    module_factory: ModuleFactory,
    data_factory: DataFactory,
    *,
    strategy: Mapping[str, Any] | str | None,
    **settings: Any,
) -> TrainingRecord:
    """Train ``module_factory()`` and return what happened, merged over ranks.

    Args:
        module_factory: See :class:`Training`, which also lists the further settings and their defaults.

    Raises:
        WorkerError: The run failed, with the traceback of the rank that failed first.
        AssertionError: Ranks disagree about something that all of them must see alike.
    """
    return run(Training(module_factory, data_factory, strategy=strategy, **settings))


def run(training: Training) -> TrainingRecord:
    """Run a training that is already described; see :func:`run_training`."""
    if training.strategy is None:
        return merge([run_isolated(_train, training, timeout=training.timeout)])
    return merge(run_distributed(_train, training.world_size, training, timeout=training.timeout))


_references: dict[bytes, TrainingRecord] = {}


def run_reference(training: Training) -> TrainingRecord:
    """Train in one process of the stock Trainer on the same data. Computed once per test session."""
    reference = training.reference()
    key = pickle.dumps(reference)
    if key not in _references:
        _references[key] = run(reference)
    return _references[key]


def make_trainer(
    strategy: Mapping[str, Any] | str | None, world_size: int, *, callbacks: Sequence[pl.Callback] = (), **flags: Any
) -> pl.Trainer:
    """A quiet Trainer on CPU, inside a worker.

    Args:
        strategy: See :class:`Training`.
        flags: Arguments of the Trainer.
    """
    if isinstance(strategy, Mapping):
        from lightning_effi import EffiStrategy

        flags["strategy"] = EffiStrategy(**strategy)
    elif strategy is not None:
        flags["strategy"] = strategy
    if strategy is not None:
        flags["plugins"] = [WorkerEnvironment(), *flags.get("plugins", ())]
    quiet: dict[str, Any] = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
    }
    return pl.Trainer(accelerator="cpu", devices=world_size, callbacks=list(callbacks), **(quiet | flags))


def _train(training: Training) -> RankRecord:
    """Runs in the worker."""
    pl.seed_everything(training.seed, verbose=False)
    chosen = {"optimizer": training.optimizer, "learning_rate": training.learning_rate}
    module = training.module_factory(**{key: value for key, value in chosen.items() if value is not None})
    batches = training.data_factory(training.steps * training.accumulate * training.data_parallel_size)
    recorder, extra = Recorder(training.record_tensors), [factory() for factory in training.callbacks]
    trainer = make_trainer(
        training.strategy,
        training.world_size,
        callbacks=[recorder, *extra],
        max_epochs=1,
        max_steps=training.steps,
        accumulate_grad_batches=training.accumulate,
        precision=training.precision,
        gradient_clip_val=training.clip,
        gradient_clip_algorithm=training.clip_algorithm if training.clip is not None else None,
        **training.trainer,
    )
    trainer.fit(module, _loader(batches, training.distributed_order))
    recorder.record.observations = [getattr(callback, "observation", None) for callback in extra]
    recorder.record.data_parallel_rank = getattr(trainer.strategy, "data_parallel_rank", trainer.global_rank)
    return recorder.record


def _loader(batches: Sequence[Any], distributed_order: bool) -> DataLoader[Any]:
    dataset = BatchList(batches)
    # Lightning gives every training loader that has no DistributedSampler a shuffling one. Item i of its order goes to
    # rank i modulo N: the single replica here draws the same order (same seed and epoch) and takes all of it.
    sampler = None
    if distributed_order:
        seed = int(os.environ["PL_GLOBAL_SEED"])  # as Lightning chooses it
        sampler = DistributedSampler(dataset, num_replicas=1, rank=0, shuffle=True, seed=seed)
    return DataLoader(dataset, batch_size=None, sampler=sampler)
