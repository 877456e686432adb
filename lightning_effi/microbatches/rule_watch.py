"""A rule of loss weights, watched for the whole run: what each batch's losses were divided by has to agree with it.

The comparison that finds a rule sees one batch. A loss that ignores a label of its own looks like a mean over samples
until something is padded; a term that compares samples with each other may only come in later batches. Both show in how
the loss was built (:mod:`~lightning_effi.microbatches.evidence`), and such a batch is compared again before it counts.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lightning_effi.microbatches.evidence import LossEvidence, Reduction

# Weights and counts are exact in fp64 up to a few roundings.
_EXACT = 1e-9
PROPORTIONAL, CONSTANT = "proportional", "constant"


@dataclass(frozen=True)
class Doubt:
    """Why a batch has to be compared.

    Attributes:
        pair: the first of two neighbouring pieces that show it.
        reason: as a user would say it.
        reduction: the signature and number of the reduction that contradicts the rule; ``None`` for a loss that is
            built in another way than those that were compared.
    """

    pair: int
    reason: str
    reduction: tuple[tuple[str, ...], int] | None = None


class RuleWatch:
    """Remembers how the losses of compared batches were built.

    Each reduction of a loss is either divided by what the rule counts in a piece (the terms of the mean), or by the
    same in every piece (a penalty on weights). Which of the two it is stays open until pieces differ; a reduction that
    is neither contradicts the rule.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[str, ...], list[set[str]]] = {}

    @property
    def watched(self) -> tuple[str, ...]:
        """The operators whose divisors are watched."""
        return self._kinds(lambda relations: bool(relations))

    @property
    def unseen(self) -> tuple[str, ...]:
        """The operators whose divisors cannot be seen, or tell nothing."""
        return self._kinds(lambda relations: not relations)

    def _kinds(self, wanted: Callable[[set[str]], bool]) -> tuple[str, ...]:
        kinds: dict[str, None] = {}
        for signature, relations in self._known.items():
            names = signature[len(signature) - len(relations) :]  # a signature ends in its reductions
            kinds.update({_plain(name): None for name, own in zip(names, relations, strict=True) if wanted(own)})
        return tuple(kinds)

    def accept(self, found: Sequence[LossEvidence | None]) -> None:
        """A comparison has just shown that the rule holds for losses built like these."""
        for evidence in found:
            if evidence is not None and evidence.signature not in self._known:
                self._known[evidence.signature] = [
                    set() if reduction.divisor is None else {PROPORTIONAL, CONSTANT}
                    for reduction in evidence.reductions
                ]

    def dismiss(self, reduction: tuple[tuple[str, ...], int]) -> None:
        """A comparison has confirmed a rule that this reduction contradicts, so that its divisors tell nothing.

        Those of a sum over rows one by one, say, each of which is divided by its own length.
        """
        signature, number = reduction
        self._known[signature][number].clear()

    def doubt(self, found: Sequence[LossEvidence | None], weights: Sequence[float]) -> Doubt | None:
        """Whether the losses of a batch's pieces, weighted like this, are built as those that were compared.

        Args:
            found: of each piece; ``None`` for a piece without a loss.
            weights: of each piece, by the rule.
        """
        alike: dict[tuple[str, ...], list[int]] = {}
        for i, evidence in enumerate(found):
            if evidence is None:
                continue
            if evidence.signature not in self._known:
                return Doubt(min(i, len(found) - 2), "it is built in another way than that of earlier batches")
            alike.setdefault(evidence.signature, []).append(i)
        for signature, pieces in alike.items():
            for number, relations in enumerate(self._known[signature]):
                seen = [(i, _reduction(found[i], number), weights[i]) for i in pieces]
                if relations and (first := _narrow(relations, seen)) is not None:
                    return Doubt(min(first, len(found) - 2), _said(seen), (signature, number))
        return None


def _narrow(relations: set[str], seen: Sequence[tuple[int, Reduction, float]]) -> int | None:
    """Take from ``relations`` what the divisors of the pieces rule out; the piece where nothing would be left."""
    left = set(relations)
    for (i, one, weight), (_, other, other_weight) in itertools.pairwise(seen):
        if one.divisor is None or other.divisor is None:
            continue
        tolerance = max(_EXACT, 2 * one.rounding, 2 * other.rounding)
        if not _equal(one.divisor, other.divisor, tolerance):
            left.discard(CONSTANT)
        if not _equal(one.divisor * other_weight, other.divisor * weight, tolerance):
            left.discard(PROPORTIONAL)
        if not left:
            return i
    relations &= left
    return None


def _reduction(evidence: LossEvidence | None, number: int) -> Reduction:
    assert evidence is not None
    return evidence.reductions[number]


def _plain(kind: str) -> str:
    """``NllLossBackward0`` as ``NllLoss``."""
    return kind.rstrip("0123456789").removesuffix("Backward")


def _equal(a: float, b: float, tolerance: float) -> bool:
    return a == b or abs(a - b) <= tolerance * max(abs(a), abs(b))


def _said(seen: Sequence[tuple[int, Reduction, float]]) -> str:
    kind = _plain(seen[0][1].kind)
    divisors = ", ".join("?" if one.divisor is None else f"{one.divisor:g}" for _, one, _ in seen)
    weights = ", ".join(f"{weight:.4g}" for *_, weight in seen)
    return f"its {kind} is divided by {divisors} in micro-batches that are weighted by {weights}"
