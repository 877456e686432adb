"""Which ranks wait for each other, by what each of them has noted. Pure: nothing is asked, and nothing is waited for.

A rank that waits for a slow one is no deadlock. It is one when ranks wait in a circle, each in a message that the next
has not come to; when two have come to the same message and take it for different operations; and when a rank waits for
one whose run has ended.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from lightning_effi.compat.torch import Message

_OF_ONE_SIZE = ("all_reduce", "allreduce", "all_gather", "reduce_scatter", "broadcast")


class Standing(NamedTuple):
    """Where a rank stands that has not moved for some time.

    Attributes:
        beat: counts how often the rank has been seen standing there.
        entered: by process group, the number of the last message that the rank has come to, where that is known.
        members: by process group, its ranks.
        messages: that it has come to and that are not complete.
        awaits: the rank for whose message it waits.
        place: the line of the user's code, or what is going on; of a run that has ended, the error it ended in.
        has_ended: its run is over.
    """

    beat: int
    entered: Mapping[str, int]
    members: Mapping[str, Sequence[int]]
    messages: Sequence[Message]
    awaits: int | None
    place: str
    has_ended: bool = False

    def noted(self) -> list[Any]:
        """What JSON can hold."""
        return [*self]  # a named tuple inside becomes a list

    @classmethod
    def of(cls, note: Sequence[Any]) -> Standing:
        """The inverse of :meth:`noted`."""
        standing = cls(*note)
        return standing._replace(messages=[Message(*message) for message in standing.messages])


def deadlock(standings: Mapping[int, Standing]) -> tuple[int, ...] | None:
    """The ranks that can never go on, in the order in which each waits for the next; ``None`` while all may."""
    waits: dict[int, set[int]] = {}
    for rank, standing in standings.items():
        for other, never in _waits_of(rank, standing, standings):
            if never:
                return rank, other
            waits.setdefault(rank, set()).add(other)
    for rank in sorted(waits):
        if (circle := _circle(rank, waits)) is not None:
            return circle
    return None


def _waits_of(rank: int, standing: Standing, standings: Mapping[int, Standing]) -> Iterator[tuple[int, bool]]:
    """The ranks that ``rank`` waits for, of those that stand still, and whether it is in vain for certain."""
    if standing.awaits is not None and standing.awaits in standings:
        yield standing.awaits, standings[standing.awaits].has_ended
    for message in standing.messages:
        for other in standing.members[message.group]:
            there = standings.get(other)
            if other == rank or there is None:
                continue
            if (entered := there.entered.get(message.group)) is None:
                continue
            if entered < message.number:
                yield other, there.has_ended
            elif any(_contradict(message, theirs) for theirs in there.messages):
                yield other, True


def _contradict(mine: Message, theirs: Message) -> bool:
    if (mine.group, mine.number) != (theirs.group, theirs.number):
        return False
    same_size = mine.size == theirs.size or not any(name in mine.operation for name in _OF_ONE_SIZE)
    return mine.operation != theirs.operation or not same_size


def _circle(start: int, waits: Mapping[int, set[int]]) -> tuple[int, ...] | None:
    """A way from ``start`` along ``waits`` back to it."""
    ways: list[tuple[int, ...]] = [(start,)]
    seen = {start}
    for way in ways:  # grows while it is gone through
        for rank in sorted(waits.get(way[-1], ())):
            if rank == start:
                return way
            if rank not in seen:
                seen.add(rank)
                ways.append((*way, rank))
    return None


def sentence(
    ranks: Sequence[int], standings: Mapping[int, Standing], histories: Mapping[int, Sequence[Message]]
) -> str:
    """What is said about ``ranks``, which :func:`deadlock` has found, by what they have done in the current batch."""
    places = "; ".join(f"rank {rank} {_doing(standings[rank])}" for rank in ranks)
    if any(standing.has_ended and standing.place for standing in (standings[rank] for rank in ranks)):
        return f"a rank has failed while others wait for it: {places}"
    ways = _parted(*(histories.get(rank, ()) for rank in ranks[:2]))
    parted = (
        ""
        if ways is None
        else (
            f". Before that, rank {ranks[0]} came to {ways[0].operation}{ways[0].place} when rank {ranks[1]} came to"
            f" {ways[1].operation}{ways[1].place}, so that values may have been mixed up"
        )
    )
    return (
        f"ranks wait for each other and none can go on: {places}{parted}. Sharded parameters, gradients, losses and"
        " collectives need all ranks at the same lines: let every rank run them, whatever its rank or batch, and keep"
        " under `if self.global_rank == 0` only what to do with the values"
    )


def _parted(mine: Sequence[Message], theirs: Sequence[Message]) -> tuple[Message, Message] | None:
    """The first messages of one group and number that two ranks have entered at different places."""
    by_number = {(message.group, message.number): message for message in theirs}
    for message in mine:
        other = by_number.get((message.group, message.number))
        if other is not None and (other.operation, other.place) != (message.operation, message.place):
            return message, other
    return None


def _doing(standing: Standing) -> str:
    if standing.has_ended:
        return f"has ended its run{standing.place}"
    if standing.awaits is not None:
        return f"waits for a message of rank {standing.awaits}{standing.place}"
    return f"waits in {standing.messages[0].operation}{standing.messages[0].place or standing.place}"
