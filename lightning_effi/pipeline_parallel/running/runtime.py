"""Executing a schedule: this rank's actions one after the other, with the messages between them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lightning_effi.pipeline_parallel.planning.schedule import Action, Schedule
from lightning_effi.pipeline_parallel.planning.timeline import timeline_of
from lightning_effi.pipeline_parallel.running.exchange import Exchange
from lightning_effi.pipeline_parallel.stand_ins import Enter, leaf_like

Forward = Callable[[Action, list[Tensor]], list[Tensor]]
"""``forward(action, received) -> sent``"""
Backward = Callable[[Action, list[Tensor], list[Tensor] | None, list[Tensor]], Callable[[], None] | None]
"""``backward(action, outputs, gradients, inputs)``; gradients are ``None`` on the last stage, which starts from its
loss. For an action ``I`` it returns what is left for the action ``W``."""


def execute(schedule: Schedule, rank: int, exchange: Exchange, forward: Forward, backward: Backward) -> None:
    """Run the actions of ``rank``."""
    spans = timeline_of(schedule).ranks[rank]
    run = _Run(exchange, forward, backward, with_backward=any(span.action.kind != "F" for span in spans))
    for span in spans:
        exchange.free(span.start)
        run(span.action)
    exchange.free(float("inf"))


class _Run:
    def __init__(self, exchange: Exchange, forward: Forward, backward: Backward, with_backward: bool) -> None:
        self._exchange, self._forward_of, self._backward_of = exchange, forward, backward
        self._with_backward = with_backward
        self._kept: dict[tuple[int, int], tuple[list[Tensor], list[Tensor]]] = {}
        self._put_off: dict[tuple[int, int], Callable[[], None] | None] = {}

    def __call__(self, action: Action) -> None:
        if action.kind == "F":
            self._forward(action)
        elif action.kind == "W":
            self._finish(action)
        else:
            self._backward(action)

    def _forward(self, action: Action) -> None:
        received = self._exchange.take(action) or []
        leaves: list[Tensor] = []
        if self._with_backward:
            leaves = [leaf_like(tensor) for tensor in received if tensor.is_floating_point()]
            entries = iter(leaves)
            received = [Enter.apply(next(entries), t) if t.is_floating_point() else t for t in received]
        sent = self._forward_of(action, received)
        self._exchange.give(action, sent)
        if self._with_backward:
            self._kept[action.stage, action.microbatch] = leaves, sent

    def _backward(self, action: Action) -> None:
        leaves, outputs = self._kept.pop((action.stage, action.microbatch))
        later = self._backward_of(action, outputs, self._exchange.take(action), leaves)
        if action.kind == "I":
            self._put_off[action.stage, action.microbatch] = later
        gradients = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
        self._exchange.give(action, gradients)

    def _finish(self, action: Action) -> None:
        later = self._put_off.pop((action.stage, action.microbatch))
        if later is not None:
            later()
