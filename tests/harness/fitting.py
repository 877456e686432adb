"""Fit a module on rows of the same global batches: each rank takes its share, a single process takes all of them.

With losses that are means over rows, the single-process run is then the right value for any code in the module, with
manual optimization and several optimizers as well. All is done in fp64, where nothing is left to rounding.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader
from typing_extensions import override

from tests.harness import make_trainer, run_distributed, run_isolated
from tests.harness.parity import assert_tensors_close
from tests.harness.pieces import assemble, piece_of

# Stage 1 differs from 2 in what is kept between the backwards of a window alone.
_STAGE_1 = pytest.param(1, marks=pytest.mark.full)
ALL_STAGES = pytest.mark.parametrize("zero_stage", [0, _STAGE_1, 2, 3], ids=lambda stage: f"zero{stage}")
SHARDED_STAGES = pytest.mark.parametrize("zero_stage", [_STAGE_1, 2, 3], ids=lambda stage: f"zero{stage}")
STAGES_OF_WINDOWS = pytest.mark.parametrize("zero_stage", [0, 1, 2, 3], ids=lambda stage: f"zero{stage}")

# Relative to the length of the step; what is left in fp64 is the order of summation.
BOUND = 1e-9


@dataclass(frozen=True)
class Fit:
    """A run of ``Trainer.fit``.

    Attributes:
        module: Makes the LightningModule, from torch's global generator.
        batches: Makes the global batches, pytrees of tensors whose first dim is the rows.
        strategy: Arguments of ``EffiStrategy``; None is the stock Trainer in one process.
        validation: Makes the global batches of validation.
        callbacks: Factories of further callbacks; the attribute ``observation`` of each comes back.
        trainer: Further arguments of the Trainer.
    """

    module: Callable[[], pl.LightningModule]
    batches: Callable[[], Sequence[Any]]
    strategy: Mapping[str, Any] | None = None
    world_size: int = 2
    validation: Callable[[], Sequence[Any]] | None = None
    precision: str = "64-true"
    callbacks: tuple[Callable[[], pl.Callback], ...] = ()
    trainer: Mapping[str, Any] = field(default_factory=dict)
    timeout: float = 60.0


@dataclass
class Outcome:
    """What one rank saw.

    Attributes:
        parameters: Parameters by name: before training, then after each batch. Pieces until :func:`whole`.
        gradients: By optimizer step: gradients of that optimizer's parameters, before clipping; absent ones are left
            out. Pieces until :func:`whole`.
        logged: ``trainer.callback_metrics`` after training.
        global_step: ``trainer.global_step`` after training.
        observations: ``observation`` of each callback.
    """

    parameters: list[dict[str, Any]] = field(default_factory=list)
    gradients: list[dict[str, Any]] = field(default_factory=list)
    logged: dict[str, float] = field(default_factory=dict)
    global_step: int = 0
    observations: list[Any] = field(default_factory=list)


def rows_of_rank(batch: Any, rank: int, world_size: int) -> Any:
    """The rows of a global batch that are rank ``rank``'s."""
    return tree_map_only(Tensor, lambda tensor: tensor.chunk(world_size)[rank], batch)


def fit(run: Fit) -> list[Outcome]:
    """Run it and return what each rank saw."""
    if run.strategy is None:
        return whole([run_isolated(_fit, run, timeout=run.timeout)])
    return whole(run_distributed(_fit, run.world_size, run, timeout=run.timeout))


def whole(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """The outcomes of all ranks, with whole tensors instead of pieces.

    Raises:
        AssertionError: Something is held by no rank, or differently by two.
    """
    tensors: dict[str, list[dict[str, Tensor]]] = {}
    for what in ("parameters", "gradients"):
        by_rank = [getattr(outcome, what) for outcome in outcomes]
        assert len({len(records) for records in by_rank}) == 1, f"ranks saw {what} at other times"
        tensors[what] = [assemble(held, f"{what}, record {i}") for i, held in enumerate(zip(*by_rank, strict=True))]
    return [replace(outcome, **tensors) for outcome in outcomes]


_references: dict[bytes, Outcome] = {}


def single_process(run: Fit) -> Outcome:
    """The same under the stock Trainer in one process; computed once per test session."""
    reference = replace(run, strategy=None, world_size=1)
    key = pickle.dumps(reference)
    if key not in _references:
        [_references[key]] = fit(reference)
    return _references[key]


def assert_equals_single_process(run: Fit, bound: float = BOUND) -> list[Outcome]:
    """Gradients and parameters of every step, logged values and ``global_step`` are those of one process."""
    outcomes, expected = fit(run), single_process(run)
    for rank, outcome in enumerate(outcomes):
        who = f"rank {rank}, "
        assert len(outcome.gradients) == len(expected.gradients) > 0
        for step, (ours, theirs) in enumerate(zip(outcome.gradients, expected.gradients, strict=True), start=1):
            assert_tensors_close(f"{who}gradients of optimizer step {step}", ours, theirs, bound)
        start = expected.parameters[0]
        for batch, (ours, theirs) in enumerate(zip(outcome.parameters, expected.parameters, strict=True)):
            moved = start if batch else None
            assert_tensors_close(f"{who}parameters after batch {batch}", ours, theirs, bound, start=moved, steps=batch)
        assert outcome.logged == pytest.approx(expected.logged, rel=1e-7), who
        assert outcome.global_step == expected.global_step
    return outcomes


class _Watch(pl.Callback):
    def __init__(self) -> None:
        self.outcome = Outcome()

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._record_parameters(pl_module)

    @override
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        self.outcome.gradients.append(
            {
                name: piece_of(parameter.grad)
                for name, parameter in pl_module.named_parameters()
                if id(parameter) in own and parameter.grad is not None
            }
        )

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        self._record_parameters(pl_module)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.outcome.logged = {key: float(value) for key, value in trainer.callback_metrics.items()}
        self.outcome.global_step = trainer.global_step

    def _record_parameters(self, module: pl.LightningModule) -> None:
        self.outcome.parameters.append({name: piece_of(parameter) for name, parameter in module.named_parameters()})


def make_fit(run: Fit) -> tuple[pl.Trainer, pl.LightningModule, DataLoader[Any], DataLoader[Any] | None, _Watch]:
    """Trainer, module, both loaders of this rank, and the callback that watches; for jobs that do more than fit."""
    pl.seed_everything(7, verbose=False)
    module = run.module()
    watch, extra = _Watch(), [factory() for factory in run.callbacks]
    defaults: dict[str, Any] = {"max_epochs": 1, "use_distributed_sampler": False, "precision": run.precision}
    trainer = make_trainer(run.strategy, run.world_size, callbacks=[watch, *extra], **(defaults | dict(run.trainer)))
    strategy: Any = trainer.strategy
    share = (strategy.data_parallel_rank, strategy.data_parallel_size) if run.world_size > 1 else (0, 1)
    train = _loader(run.batches(), *share)
    validation = None if run.validation is None else _loader(run.validation(), *share)
    return trainer, module, train, validation, watch


def _fit(run: Fit) -> Outcome:
    trainer, module, train, validation, watch = make_fit(run)
    trainer.fit(module, train, validation)
    watch.outcome.observations = [
        callback.observation for callback in trainer.callbacks if hasattr(callback, "observation")
    ]
    return watch.outcome


def _loader(batches: Sequence[Any], rank: int, world_size: int) -> DataLoader[Any]:
    return DataLoader([rows_of_rank(batch, rank, world_size) for batch in batches], batch_size=None)
