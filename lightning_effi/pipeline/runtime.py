"""Executing a schedule: forwards, backwards and the messages between stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_effi.pipeline.intercept import TensorMeta
from lightning_effi.pipeline.schedule import Action

Forward = Callable[[int, list[Tensor]], list[Tensor]]
"""``forward(microbatch, received) -> sent``"""
Backward = Callable[[int, list[Tensor], list[Tensor] | None], None]
"""``backward(microbatch, outputs, gradients)``; ``None``: the last stage, which starts from its loss."""


class _Message(NamedTuple):
    buffers: list[Tensor]
    works: list[Any]


@dataclass
class StageIO:
    """Where a stage stands in its pipeline.

    Attributes:
        stage: index of this rank's stage.
        ranks: global ranks of all stages.
        group: process group of the pipeline.
        inputs: for each micro-batch, what this stage receives.
        outputs: for each micro-batch, what it sends.
    """

    stage: int
    ranks: Sequence[int]
    group: dist.ProcessGroup
    inputs: Sequence[Sequence[TensorMeta]]
    outputs: Sequence[Sequence[TensorMeta]]
    _sent: list[tuple[Any, Tensor]] = field(default_factory=list)

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == len(self.ranks) - 1

    def post(self, action: Action) -> _Message | None:
        """Start receiving what ``action`` needs; ``None`` where it needs nothing."""
        forward = action.kind == "F"
        if (forward and self.is_first) or (not forward and self.is_last):
            return None
        metas = self.inputs[action.microbatch] if forward else _differentiable(self.outputs[action.microbatch])
        source = self.ranks[self.stage - 1 if forward else self.stage + 1]
        buffers = [torch.empty(meta.shape, dtype=meta.dtype, device=meta.device) for meta in metas]
        return _Message(buffers, [dist.irecv(buffer, source, group=self.group) for buffer in buffers])

    def send(self, tensors: Sequence[Tensor], action: Action) -> None:
        """Send a forward's outputs on, or a backward's input gradients back, without waiting."""
        target = self.ranks[self.stage + 1 if action.kind == "F" else self.stage - 1]
        for tensor in tensors:
            message = tensor.detach().contiguous()
            self._sent.append((dist.isend(message, target, group=self.group), message))

    def wait_for_sends(self) -> None:
        for work, _ in self._sent:
            work.wait()
        self._sent.clear()


def execute(actions: Sequence[Action], io: StageIO, forward: Forward, backward: Backward) -> None:
    """Run this rank's actions; the next action's messages are under way while one is computed."""
    with_backward = any(action.kind == "B" for action in actions)
    inputs: dict[int, list[Tensor]] = {}
    outputs: dict[int, list[Tensor]] = {}
    posted = [io.post(action) for action in actions[:1]]
    for number, action in enumerate(actions):
        posted += [io.post(following) for following in actions[number + 1 : number + 2]]
        received = _wait(posted[number])
        posted[number] = None
        index = action.microbatch
        if action.kind == "F":
            if with_backward:
                received = [tensor.requires_grad_(tensor.is_floating_point()) for tensor in received]
            # a block may work in place on what it is given, which a leaf that needs a gradient does not allow
            sent = forward(index, [t.view_as(t) if t.requires_grad else t for t in received])
            _check(sent, io.outputs[index], io.stage)
            if not io.is_last:
                io.send(sent, action)
            if with_backward:
                inputs[index], outputs[index] = received, sent
        else:
            backward(index, outputs.pop(index), None if io.is_last else received)
            leaves = [leaf for leaf in inputs.pop(index) if leaf.requires_grad]
            if not io.is_first:
                io.send([torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves], action)
    io.wait_for_sends()


def run_backward(outputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    """Backward of what was sent: gradients come for its floating-point tensors, in their order."""
    floating = [tensor for tensor in outputs if tensor.is_floating_point()]
    pairs = [(t, g) for t, g in zip(floating, gradients, strict=True) if t.requires_grad]
    if pairs:
        torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs])


def _differentiable(metas: Sequence[TensorMeta]) -> list[TensorMeta]:
    return [meta for meta in metas if meta.dtype.is_floating_point]


def _wait(message: _Message | None) -> list[Tensor]:
    if message is None:
        return []
    for work in message.works:
        work.wait()
    return message.buffers


def _check(sent: Sequence[Tensor], metas: Sequence[TensorMeta], stage: int) -> None:
    for tensor, meta in zip(sent, metas, strict=True):
        if tuple(tensor.shape) != meta.shape or tensor.dtype != meta.dtype:
            raise RuntimeError(
                f"pipeline: stage {stage} sends a tensor of shape {tuple(tensor.shape)} and {tensor.dtype}, and was"
                f" traced to send {meta.shape} and {meta.dtype}"
            )
