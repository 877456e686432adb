"""Messages between stages, in one order on which all ranks agree.

What crosses a boundary has mostly the shapes that it had in the last step with a batch of the same shapes, so receives
are posted with these. A step may choose its own lengths, though: a forward's message comes with a short header over the
group for the CPU. Where shapes are others, what was posted is answered with zeros, and the tensors follow the header.

Gloo and NCCL match the sends and receives of two ranks by their order alone, and one rank may hold several stages. So
the order is worked out beforehand: a message stands where the timeline says that it is sent, and both of its ranks post
it there, between the same other messages. A receive is posted as early as that allows, so that the transfer overlaps
with computation. The order respects every dependency, so that no two ranks ever wait for each other.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_effi.comm.waiting import waiting_for
from lightning_effi.pipeline_parallel.planning.schedule import Action, Schedule
from lightning_effi.pipeline_parallel.planning.timeline import timeline_of
from lightning_effi.pipeline_parallel.stand_ins import TensorMeta


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


Expected = Sequence[TensorMeta] | None
"""What is expected to cross a boundary; ``None`` where that is not known."""


class _Receive(NamedTuple):
    source: int  # counted among all ranks
    buffers: list[Tensor]
    works: list[Any]


class Exchange:
    """One rank's part in the messages of one step.

    Args:
        schedule: of all ranks.
        rank: place of this rank in the pipeline.
        ranks: global ranks of the pipeline.
        group: its process group.
        control: the same, with a backend for tensors on the CPU.
        device: where tensors arrive.
        expected: for each micro-batch and boundary (the first lies before stage 1), what is expected to cross it; the
            two ranks at a boundary expect the same.

    Attributes:
        crossed: what really crossed, by boundary and micro-batch, as far as this rank knows.
    """

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        ranks: Sequence[int],
        group: dist.ProcessGroup,
        control: dist.ProcessGroup,
        device: torch.device,
        expected: Sequence[Sequence[Expected]],
    ) -> None:
        self._rank, self._ranks, self._group, self._control = rank, ranks, group, control
        self._device, self._expected = device, expected
        self._place = schedule.placement
        self._to_post = deque(m for m in plan_messages(schedule) if rank in (m.source, m.target))
        self._received: dict[Action, _Receive] = {}
        self._handed_over: dict[Action, list[Tensor]] = {}
        self._sent: deque[tuple[float, list[Any], list[Tensor]]] = deque()
        self.crossed: dict[tuple[int, int], tuple[TensorMeta, ...]] = {}
        self._post_receives()

    def take(self, action: Action) -> list[Tensor] | None:
        """What ``action`` gets from the stage before (``F``) or behind; ``None`` where there is no such stage."""
        if action not in self._received:
            return self._handed_over.pop(action, None)
        source, buffers, works = self._received.pop(action)
        with waiting_for(source):
            other = self._receive_others(action) if action.kind == "F" else None
            for work in works:
                work.wait()
        return buffers if other is None else other

    def give(self, action: Action, tensors: Sequence[Tensor]) -> None:
        """Hand a forward's outputs on, or a backward's input gradients back, without waiting."""
        consumer = action._replace(stage=action.stage + (1 if action.kind == "F" else -1))
        if not 0 <= consumer.stage < len(self._place):
            return
        if action.kind == "F":
            self.crossed[action.stage, action.microbatch] = tuple(TensorMeta.of(tensor) for tensor in tensors)
        if self._place[consumer.stage] == self._rank:
            # a copy, since the next stage may work in place on what it is given
            self._handed_over[consumer] = [tensor.detach().clone() for tensor in tensors]
            return
        message = self._to_post.popleft()
        assert message.producer == action
        target = self._ranks[message.target]
        contents = [tensor.detach().contiguous() for tensor in tensors]
        header: list[Tensor] = []
        if action.kind == "F":
            contents, header = self._with_header(action, contents)
        tag = self._tag(action.stage, action.microbatch)
        works = [dist.isend(part, target, group=self._control, tag=tag) for part in header]
        works += [dist.isend(tensor, target, group=self._group) for tensor in contents]
        contents += header
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
            buffers = [self._empty(meta) for meta in self._awaited(message.producer)]
            works = [dist.irecv(buffer, source, group=self._group) for buffer in buffers]
            self._received[message.consumer] = _Receive(source, buffers, works)

    def _awaited(self, producer: Action) -> Sequence[TensorMeta]:
        """A forward sends all that crosses, a backward the gradients of what has crossed and can have one."""
        if producer.kind == "F":
            return self._expected[producer.microbatch][producer.stage] or ()
        crossed = self.crossed[producer.stage - 1, producer.microbatch]
        return [meta for meta in crossed if meta.dtype.is_floating_point]

    def _with_header(self, action: Action, contents: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """What is sent over the device's group, and what over the CPU's: a header, and tensors of other shapes."""
        expected = self._expected[action.microbatch][action.stage]
        if expected is not None and len(expected) == len(contents) and all(map(TensorMeta.fits, expected, contents)):
            return contents, [torch.zeros(1, dtype=torch.int64)]
        metas = self.crossed[action.stage, action.microbatch]
        described = json.dumps([(meta.shape, str(meta.dtype).removeprefix("torch.")) for meta in metas]).encode()
        header = [torch.tensor([len(described)]), torch.frombuffer(bytearray(described), dtype=torch.uint8)]
        others = [tensor.cpu().reshape(-1).view(torch.uint8) for tensor in contents if tensor.numel()]
        return [self._empty(meta).zero_() for meta in expected or ()], header + others

    def _receive_others(self, action: Action) -> list[Tensor] | None:
        """``None`` where what came is what was expected."""
        boundary = action.stage - 1
        source, tag = self._ranks[self._place[boundary]], self._tag(boundary, action.microbatch)
        length = torch.zeros(1, dtype=torch.int64)
        dist.recv(length, source, group=self._control, tag=tag)
        if not length:
            self.crossed[boundary, action.microbatch] = tuple(self._expected[action.microbatch][boundary] or ())
            return None
        described = torch.empty(int(length), dtype=torch.uint8)
        dist.recv(described, source, group=self._control, tag=tag)
        metas = [
            TensorMeta(tuple(shape), getattr(torch, dtype), self._device)
            for shape, dtype in json.loads(described.numpy().tobytes())
        ]
        self.crossed[boundary, action.microbatch] = tuple(metas)
        tensors = [torch.empty(meta.shape, dtype=meta.dtype) for meta in metas]
        for tensor in tensors:
            if tensor.numel():
                dist.recv(tensor.view(-1).view(torch.uint8), source, group=self._control, tag=tag)
        return [tensor.to(self._device) for tensor in tensors]

    def _empty(self, meta: TensorMeta) -> Tensor:
        return torch.empty(meta.shape, dtype=meta.dtype, device=self._device)

    def _tag(self, boundary: int, microbatch: int) -> int:
        """Ranks may take messages in another order than that in which they were sent."""
        return 1 + microbatch * len(self._place) + boundary
