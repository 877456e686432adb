"""torchmetrics metrics that a step updates: only the last stage saw real values, and all ranks must hold its state."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from lightning_effi.context import Group
from lightning_effi.microbatches.logs import Logged, StepResult


class MetricSync:
    """Keeps the metrics of a module equal over a pipeline.

    Args:
        module: whose metrics are meant.
        group: the ranks of the pipeline.
    """

    def __init__(self, module: nn.Module, group: Group) -> None:
        self._group = group
        self._metrics = {name: child for name, child in module.named_modules() if is_metric(child)}
        self._names = {id(metric): name for name, metric in self._metrics.items()}

    def portable(self, result: StepResult) -> StepResult:
        """With metrics replaced by their names."""
        logged = [
            Logged(call.name, _Named(self._names[id(call.value)]), call.arguments)
            if id(call.value) in self._names
            else call
            for call in result.logged
        ]
        return StepResult(result.loss, result.output, logged, result.evidence)

    def local(self, result: StepResult) -> StepResult:
        """With names replaced by this rank's metrics."""
        for call in result.logged:
            if isinstance(call.value, _Named):
                call.value = self._metrics[call.value.name]
        return result

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Inside, updates count nothing: a step that runs for another stage of this rank must not update them again."""
        before = {name: copy.deepcopy(_state(metric)) for name, metric in self._metrics.items()}
        try:
            yield
        finally:
            for name, state in before.items():
                self._metrics[name].__dict__.update(state)

    def follow(self, stage: int) -> None:
        """Take over the state of all metrics from ``stage``; every rank of the pipeline must call this."""
        if not self._metrics:
            return
        control = self._group.control
        mine = dist.get_rank(control) == stage
        message = [{name: _moved(_state(metric), "cpu") for name, metric in self._metrics.items()} if mine else None]
        dist.broadcast_object_list(message, dist.get_process_group_ranks(control)[stage], group=control)
        if not mine and message[0] is not None:
            for name, state in message[0].items():
                metric = self._metrics[name]
                metric.__dict__.update(_moved(state, metric.device))


class _Named:
    def __init__(self, name: str) -> None:
        self.name = name


def is_metric(module: nn.Module) -> bool:
    """Whether this is a torchmetrics metric, found without importing torchmetrics."""
    return any(
        kind.__name__ == "Metric" and kind.__module__.startswith("torchmetrics") for kind in type(module).__mro__
    )


def _state(metric: Any) -> dict[str, Any]:
    keys = [*metric._defaults, "_update_count", "_computed", "_forward_cache"]
    return {key: copy.copy(metric.__dict__[key]) for key in keys if key in metric.__dict__}


def _moved(state: dict[str, Any], device: Any) -> dict[str, Any]:
    """A tensor that is sent from another rank's device would arrive on that device."""
    return tree_map(lambda value: value.to(device) if isinstance(value, Tensor) else value, state)
