"""What a training run leaves for comparison, and the callback that collects it inside the run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from typing_extensions import override

from tests.harness.pieces import Piece, assemble, piece_of

Tensors = dict[str, Tensor]


@dataclass
class TrainingRecord:
    """A run as a single process would have seen it.

    Attributes:
        losses: Loss of every micro-batch, in the order of the data: within micro-step k first that of data-parallel
            rank 0, then of rank 1, and so on. A step without loss is NaN.
        gradients: Full gradients before clipping, by parameter name, one dict per optimizer step. A missing gradient
            is recorded as zeros.
        gradient_norms: 2-norm of each of these.
        parameters: Full parameters by name: before training, then after each optimizer step (``steps + 1`` dicts).
        learning_rates: Learning rates of all parameter groups at each optimizer step.
        logged: ``trainer.callback_metrics`` after training, as rank 0 has them.
        global_step: ``trainer.global_step`` after training.
        observations: ``observation`` of each extra callback, per rank.
        data_parallel_size: Number of ranks that saw different data.
    """

    losses: list[float]
    gradients: list[Tensors]
    gradient_norms: list[float]
    parameters: list[Tensors]
    learning_rates: list[list[float]]
    logged: dict[str, float]
    global_step: int
    observations: list[list[Any]]
    data_parallel_size: int = 1


@dataclass
class RankRecord:
    """What one rank sees of a run. Attributes as in :class:`TrainingRecord`; tensors are the pieces it holds."""

    losses: list[float] = field(default_factory=list)
    gradients: list[dict[str, Piece]] = field(default_factory=list)
    parameters: list[dict[str, Piece]] = field(default_factory=list)
    learning_rates: list[list[float]] = field(default_factory=list)
    logged: dict[str, float] = field(default_factory=dict)
    global_step: int = 0
    observations: list[Any] = field(default_factory=list)
    data_parallel_rank: int = 0


def full_tensor(tensor: Tensor) -> Tensor:
    """A copy of the whole tensor; a collective if it is sharded, so to be called by all ranks in the same order."""
    with torch._C.DisableTorchFunction():  # what a run lets DTensor do is neither used nor paid for here
        if isinstance(tensor, DTensor):
            tensor = tensor.full_tensor()
        return tensor.detach().cpu().clone()


def full_parameters(module: pl.LightningModule) -> Tensors:
    """All parameters by name, whole; a collective. A tied parameter appears once."""
    return {name: full_tensor(parameter) for name, parameter in module.named_parameters()}


def total_norm(tensors: Iterable[Tensor]) -> float:
    """2-norm over all tensors, accumulated in fp64."""
    return sum(float(tensor.double().square().sum()) for tensor in tensors) ** 0.5


class Recorder(pl.Callback):
    """Fills a :class:`RankRecord`.

    Args:
        tensors: Whether gradients and parameters are recorded, too.
    """

    def __init__(self, tensors: bool = True) -> None:
        self.tensors = tensors
        self.record = RankRecord()
        self._recorded_steps = 0

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._record_parameters(pl_module)

    @override
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        # Lightning calls this hook after unscaling and before clipping.
        self.record.learning_rates.append([group["lr"] for group in optimizer.param_groups])
        if self.tensors:
            self.record.gradients.append(
                {
                    name: piece_of(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
                    for name, parameter in pl_module.named_parameters()
                    if parameter.requires_grad
                }
            )

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs  # an empty dict: no loss
        # The output holds the loss as it went into backward, divided by the number of batches of the window.
        unscaled = float("nan") if loss is None else float(full_tensor(loss)) * trainer.accumulate_grad_batches
        self.record.losses.append(unscaled)
        if trainer.global_step > self._recorded_steps:
            self._recorded_steps = trainer.global_step
            self._record_parameters(pl_module)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.record.logged = {key: float(value) for key, value in trainer.callback_metrics.items()}
        self.record.global_step = trainer.global_step

    def _record_parameters(self, module: pl.LightningModule) -> None:
        if self.tensors:
            self.record.parameters.append({name: piece_of(p) for name, p in module.named_parameters()})


def merge(records: list[RankRecord]) -> TrainingRecord:
    """One record from those of all ranks.

    Raises:
        AssertionError: Ranks disagree about something that all of them must see alike.
    """
    first = records[0]
    streams: dict[int, list[float]] = {}
    for rank, record in enumerate(records):
        losses = streams.setdefault(record.data_parallel_rank, record.losses)
        assert _same(record.losses, losses), f"rank {rank} has other losses than ranks with the same data"
        for key in ("learning_rates", "global_step"):
            ours, theirs = getattr(record, key), getattr(first, key)
            assert ours == theirs, f"{key} is {ours} on rank {rank}, {theirs} on rank 0"
    # ranks of a pipeline may hold stages from all over the module; before it was split they held all of it, in order
    order = {name: place for place, name in enumerate(first.parameters[0])} if first.parameters else {}
    in_order = [streams[data_parallel_rank] for data_parallel_rank in sorted(streams)]
    gradients = [
        _ordered(assemble([record.gradients[k] for record in records], f"gradients of step {k + 1}"), order)
        for k in range(len(first.gradients))
    ]
    parameters = [
        _ordered(assemble([record.parameters[k] for record in records], f"parameters after step {k}"), order)
        for k in range(len(first.parameters))
    ]
    return TrainingRecord(
        losses=[loss for micro_step in zip(*in_order, strict=True) for loss in micro_step],
        gradients=gradients,
        gradient_norms=[total_norm(step.values()) for step in gradients],
        parameters=parameters,
        learning_rates=first.learning_rates,
        logged=first.logged,
        global_step=first.global_step,
        observations=[record.observations for record in records],
        data_parallel_size=len(streams),
    )


def _ordered(tensors: Tensors, order: Mapping[str, int]) -> Tensors:
    return {name: tensors[name] for name in sorted(tensors, key=order.__getitem__)}


def _same(a: list[float], b: list[float]) -> bool:
    return len(a) == len(b) and all(x == y or (x != x and y != y) for x, y in zip(a, b, strict=True))
