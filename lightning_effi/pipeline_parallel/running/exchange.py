"""Messages between stages, in one order on which all ranks agree.

Gloo and NCCL match the sends and receives of two ranks by their order alone, and one rank may hold several stages. So
the order is worked out beforehand: a message stands where the timeline says that it is sent, and both of its ranks post
it there, between the same other messages. A receive is posted as early as that allows, so that the transfer overlaps
with computation. The order respects every dependency, so that no two ranks ever wait for each other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_effi.pipeline_parallel.intercept import TensorMeta
from lightning_effi.pipeline_parallel.planning.schedule import Action, Schedule
from lightning_effi.pipeline_parallel.planning.timeline import timeline_of


class Message(NamedTuple):
    """What an action of one rank hands to an action of another.

    ``sent`` and ``used``: the ends of the two actions in the timeline.
    """

    sent: float
    producer: Action
    consumer: Action
    source: int
    target: int
    used: float


@lru_cache(maxsize=64)
def plan_messages(schedule: Schedule) -> tuple[Message, ...]:
    """All messages between ranks, in the order in which they are posted."""
    timeline = timeline_of(schedule)
    ends = {span.action: span.end for spans in timeline.ranks for span in spans}
    place = schedule.placement
    messages = [
        Message(ends[producer], producer, consumer, place[producer.stage], place[consumer.stage], ends[consumer])
        for consumer in ends
        for producer in schedule.inputs(consumer)
        if place[producer.stage] != place[consumer.stage]
    ]
    return tuple(sorted(messages))


class _Receive(NamedTuple):
    buffers: list[Tensor]
    works: list[Any]


class Exchange:
    """One rank's part in the messages of one step.

    Args:
        schedule: of all ranks.
        rank: place of this rank in the pipeline.
        ranks: global ranks of the pipeline.
        group: its process group.
        metas: for each micro-batch and boundary (the first lies before stage 1), what crosses it.
    """

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        ranks: Sequence[int],
        group: dist.ProcessGroup,
        metas: Sequence[Sequence[Sequence[TensorMeta]]],
    ) -> None:
        self._rank, self._ranks, self._group, self._metas = rank, ranks, group, metas
        self._place = schedule.placement
        self._to_post = deque(m for m in plan_messages(schedule) if rank in (m.source, m.target))
        self._received: dict[Action, _Receive] = {}
        self._handed_over: dict[Action, list[Tensor]] = {}
        self._sent: deque[tuple[float, list[Any], list[Tensor]]] = deque()
        self._post_receives()

    def take(self, action: Action) -> list[Tensor] | None:
        """What ``action`` gets from the stage before (``F``) or behind; ``None`` where there is no such stage."""
        if action in self._received:
            buffers, works = self._received.pop(action)
            for work in works:
                work.wait()
            return buffers
        return self._handed_over.pop(action, None)

    def give(self, action: Action, tensors: Sequence[Tensor]) -> None:
        """Hand a forward's outputs on, or a backward's input gradients back, without waiting.

        Raises:
            RuntimeError: where a tensor is not what the other side expects.
        """
        consumer = action._replace(stage=action.stage + (1 if action.kind == "F" else -1))
        if not 0 <= consumer.stage < len(self._place):
            return
        self._check(tensors, action)
        if self._place[consumer.stage] == self._rank:
            # a copy, since the next stage may work in place on what it is given
            self._handed_over[consumer] = [tensor.detach().clone() for tensor in tensors]
            return
        message = self._to_post.popleft()
        assert message.producer == action
        target = self._ranks[message.target]
        contents = [tensor.detach().contiguous() for tensor in tensors]
        works = [dist.isend(tensor, target, group=self._group) for tensor in contents]
        self._sent.append((message.used, works, contents))
        self._post_receives()

    def free(self, now: float) -> None:
        """Let go of what has been sent, and by the timeline been used before ``now``.

        Gloo tells of a send's end only to those who wait for it. By then the other side has posted its receive, so that
        waiting costs nothing, and holds up nobody for ever.
        """
        for sent in [sent for sent in self._sent if sent[0] <= now]:
            self._sent.remove(sent)
            for work in sent[1]:
                work.wait()

    def _post_receives(self) -> None:
        """Post all receives up to the next send, whose contents are not there yet."""
        while self._to_post and self._to_post[0].target == self._rank:
            message = self._to_post.popleft()
            source = self._ranks[message.source]
            buffers = [torch.empty(m.shape, dtype=m.dtype, device=m.device) for m in self._crossing(message.producer)]
            works = [dist.irecv(buffer, source, group=self._group) for buffer in buffers]
            self._received[message.consumer] = _Receive(buffers, works)

    def _crossing(self, producer: Action) -> list[TensorMeta]:
        """A forward sends all that crosses, a backward the gradients of what can have one."""
        metas = self._metas[producer.microbatch]
        if producer.kind == "F":
            return list(metas[producer.stage])
        return [meta for meta in metas[producer.stage - 1] if meta.dtype.is_floating_point]

    def _check(self, tensors: Sequence[Tensor], action: Action) -> None:
        for tensor, meta in zip(tensors, self._crossing(action), strict=True):
            if tuple(tensor.shape) != meta.shape or tensor.dtype != meta.dtype:
                raise RuntimeError(
                    f"pipeline: stage {action.stage} sends a tensor of shape {tuple(tensor.shape)} and {tensor.dtype},"
                    f" and was traced to send {meta.shape} and {meta.dtype}"
                )
