"""What a step returned and logged on the stage that knows it, on every rank, so that all go on alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_effi.context import Group
from lightning_effi.microbatches.logs import StepResult
from lightning_effi.pipeline_parallel.metrics import MetricSync
from lightning_effi.pipeline_parallel.tree import tree_map

Call = tuple[int, int]
"""A micro-batch, and the how-manieth call of ``self.log`` in it."""


class SharedResults:
    """The last stage's results, with what only earlier ones know of them.

    Args:
        group: the ranks of the pipeline.
        last: the place of the last stage's rank among them.
        device: of this rank.
        metrics: of the module, which results name.
    """

    def __init__(self, group: Group, last: int, device: torch.device, metrics: MetricSync) -> None:
        self._group, self._last, self._device, self._metrics = group, last, device, metrics
        self._ranks = dist.get_process_group_ranks(group.control)

    def share(
        self, results: Sequence[StepResult], unknown: Sequence[Call], early: Mapping[Call, Any]
    ) -> list[StepResult]:
        """The results of all micro-batches.

        Args:
            results: of the last stage, where this is its rank.
            unknown: calls of ``self.log`` whose values the last stage does not know, there.
            early: values that this rank's other stages logged, as far as they know them.
        """
        message: list[Any] = [None, None]
        if dist.get_rank(self._group.control) == self._last:
            # a tensor of another rank's device would arrive on that device
            portable = [moved(self._metrics.portable(detached(result)), torch.device("cpu")) for result in results]
            message = [portable, list(unknown)]
        dist.broadcast_object_list(message, self._ranks[self._last], group=self._group.control)
        shared, missing = message
        if missing:
            for (index, number), value in self._known_elsewhere(missing, early).items():
                shared[index].logged[number].value = value
        return [self._metrics.local(moved(result, self._device)) for result in shared]

    def _known_elsewhere(self, missing: Sequence[Call], early: Mapping[Call, Any]) -> dict[Call, Any]:
        """What the step logs between its blocks is only known on their stage."""
        mine = {key: early[key] for key in missing if key in early}
        mine = {key: value.cpu() if isinstance(value, Tensor) else value for key, value in mine.items()}
        everybodys: list[Any] = [None] * len(self._ranks)
        dist.all_gather_object(everybodys, mine, group=self._group.control)
        return {key: value for each in everybodys for key, value in each.items()}


def moved(result: StepResult, device: torch.device) -> StepResult:
    """With all tensors on ``device``."""

    def move(value: Any) -> Any:
        return value.to(device) if isinstance(value, Tensor) else value

    for call in result.logged:
        call.value = move(call.value)
    return StepResult(move(result.loss), tree_map(move, result.output), result.logged, result.evidence)


def detached(result: StepResult) -> StepResult:
    """Without autograd's graph."""

    def detach(value: Any) -> Any:
        return value.detach() if isinstance(value, Tensor) else value

    return StepResult(detach(result.loss), tree_map(detach, result.output), result.logged, result.evidence)
