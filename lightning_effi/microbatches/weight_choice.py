"""Which rule weights the pieces of a batch: asked of the module itself, by comparing pieces with an uncut batch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor

from lightning_effi.comm.agreement import Agreement
from lightning_effi.config import Microbatches
from lightning_effi.microbatches.evidence import LossEvidence
from lightning_effi.microbatches.logs import LogRules, StepResult
from lightning_effi.microbatches.rule_watch import Doubt, RuleWatch
from lightning_effi.microbatches.split import Piece, cut, replaced, tensors
from lightning_effi.microbatches.weights import ComparedConstants, Rule, candidates, fixed_rule

# Where rules stay indistinguishable within rounding for so many comparisons, the closest one is taken for good.
_MAX_COMPARISONS = 8


class WeightChoice:
    """The weights of each batch's pieces, by the rule that reproduces the loss of the whole batch.

    Args:
        config: the user's choice; a fixed rule is taken without comparison.
        low_precision: whether the compared losses are computed from numbers of 16 bits; asked at each comparison.
        agreement: among all ranks that run a step together, or ``None``.
        run: forward of some pieces from equal randomness; its losses are compared. With ``True`` all of them are run
            for the comparison alone, and what ran for another purpose does not count.
        log_rules: learns on the way how logged values combine.
    """

    def __init__(
        self,
        config: Microbatches,
        *,
        low_precision: Callable[[], bool],
        agreement: Agreement | None,
        run: Callable[[Sequence[Piece], bool], list[StepResult]],
        log_rules: LogRules,
    ) -> None:
        self._config = config
        self._low_precision = low_precision
        self._agreement = agreement
        self._run = run
        self._log_rules = log_rules
        self._fixed = fixed_rule(config)
        self._rules: list[Rule] | None = None
        self._comparisons = 0
        self._errors: dict[str, float] = {}  # of each rule, summed over comparisons and ranks
        self._announced = ""
        self._compared_this_batch = False
        self._first_question: tuple[Piece, Sequence[Piece]] | None = None
        self._watch = RuleWatch()

    def first_question(self, batch: Any, rows: int, pieces: Sequence[Piece]) -> Piece | None:
        """What :meth:`weights` will run as a whole for its first comparison; ``None`` where none is to come."""
        if self._fixed is not None or len(pieces) == 1 or self._comparisons:
            return None
        self._refuse_to_join(batch, pieces)
        self._first_question = self._question(batch, rows, pieces, True, None)
        return self._first_question[0]

    def weights(self, batch: Any, rows: int, pieces: Sequence[Piece]) -> list[float]:
        """One weight a piece, so that the weighted sum of their losses is the loss of the batch.

        Raises:
            RuntimeError: on all ranks, where no rule reproduces the loss of the uncut batch.
        """
        self._compared_this_batch = False
        if self._fixed is not None:
            return self._fixed(pieces)
        if self._config.weight == "valid_labels":  # windows and ranks are averaged by the amounts themselves
            self._find_counted_positions(batch, rows)
        if len(pieces) == 1:
            return [1.0]
        if self._rules is None:
            self._rules = self._common(candidates(self._config, batch, rows))
        if not self._comparisons:
            self._compare(batch, rows, pieces, uneven=True)
            self._first_question = None
        while len(self._rules) > 1 and self._any([self._disagree(pieces)])[0]:
            if not self._compare(batch, rows, pieces, uneven=False):
                break
        weights = self._rules[0].weights(pieces)
        if self._announced != self._rules[0].name:
            self._announced = self._rules[0].name
            rank_zero_info(f"lightning_effi: micro-batches are weighted by {self._announced}")
        if weights is None:
            raise RuntimeError(
                f"micro-batches are weighted by {self._rules[0].name}, which this batch does not have. Batches of"
                " different kinds need an explicit rule: Microbatches(weight=...)"
            )
        return weights

    @property
    def found(self) -> tuple[str, ...]:
        """The rule and the evidence for it, as lines of the plan; none before the first batch."""
        if self._fixed is not None:
            return (f"micro-batches are weighted by '{self._config.weight}', as configured",)
        if not self._announced:
            return ()
        lines = [
            f"micro-batches are weighted by {self._announced}: {self._comparisons} comparisons with an uncut batch, and"
            f" what the loss is divided by in each batch ({', '.join(self._watch.watched) or 'not seen'})"
        ]
        if self._watch.unseen:
            lines.append(f"not watched, since it does not show what it divides by: {', '.join(self._watch.unseen)}")
        return tuple(lines)

    def amounts(self, pieces: Sequence[Piece]) -> list[float]:
        """What each piece counts for in the mean over windows and ranks; known once :meth:`weights` was called."""
        assert self._rules is not None
        return [float(self._rules[0].amount(piece)) for piece in pieces]

    def _find_counted_positions(self, batch: Any, rows: int) -> None:
        """Whether the first position of the labels counts, which batches of full rows do not tell by their weights.

        The batch is run again with the first position ignored: a causal model's loss does not notice.

        Raises:
            ValueError: where several tensors are called as the labels are.
        """
        if self._rules is None:
            self._rules = self._common(candidates(self._config, batch, rows))
            if len({rule.labels for rule in self._rules}) > 1:
                names = ", ".join(dict.fromkeys(f"'{rule.labels}'" for rule in self._rules))
                raise ValueError(f"microbatches: weight='valid_labels' finds several labels in a batch: {names}")
        if len(self._rules) == 1:
            return
        whole = Piece(batch, 0, rows)
        amounts = [float(rule.amount(whole)) for rule in self._rules]
        if not self._any([amounts[0] != amounts[1]])[0]:
            return
        labels = tensors(batch)[str(self._rules[0].labels)]
        masked = labels.clone()
        masked[:, 0] = self._config.ignore_index
        with_first, without = self._run([whole, Piece(replaced(batch, labels, masked), 0, rows)], False)
        noticed = with_first.loss is None or without.loss is None or not torch.equal(with_first.loss, without.loss)
        self._rules = [self._rules[1] if self._any([noticed])[0] else self._rules[0]]

    def confirm(
        self,
        batch: Any,
        rows: int,
        pieces: Sequence[Piece],
        weights: Sequence[float],
        evidence: Sequence[LossEvidence | None],
    ) -> None:
        """After the pieces of a batch have run, before their gradients are used: were their losses built as expected?

        Losses that speak against the rule, or that no comparison has seen, are compared with an uncut batch.

        Raises:
            RuntimeError: on all ranks, where the rule does not hold for this batch.
        """
        if self._fixed is not None or len(pieces) == 1:
            return
        if self._compared_this_batch:
            self._watch.accept(evidence)
        while self._any([(doubt := self._watch.doubt(evidence, weights)) is not None])[0]:
            pair = 0 if doubt is None else doubt.pair
            if self._agreement is not None:  # ranks that run a step together run the same pieces
                pair = max(self._agreement.gather(pair))
            if not self._compare(batch, rows, pieces, uneven=False, pair=pair, doubt=doubt):
                return
            if doubt is not None and doubt.reduction is not None:
                self._watch.dismiss(doubt.reduction)
            self._watch.accept(evidence)

    def uncut(self, batch: Any, pieces: Sequence[Piece]) -> list[tuple[Any, float]]:
        """What ``training_step`` can be given without being cut, with weights that make up the loss of the batch."""
        if self._config.splitter is None or self._fixed is None:
            return [(batch, 1.0)]
        return [(piece.data, weight) for piece, weight in zip(pieces, self._fixed(pieces), strict=True)]

    def _common(self, rules: list[Rule]) -> list[Rule]:
        """Only those that all ranks know, in the first rank's order, since they are ruled out together."""
        if self._agreement is None:
            return rules
        known = self._agreement.gather([rule.name for rule in rules])
        by_name = {rule.name: rule for rule in rules}
        return [by_name[name] for name in known[0] if all(name in names for names in known)]

    def _any(self, flags: list[bool]) -> list[bool]:
        return flags if self._agreement is None else self._agreement.any(flags)

    def _disagree(self, pieces: Sequence[Piece]) -> bool:
        assert self._rules is not None
        found = [rule.weights(pieces) for rule in self._rules]
        return any(other is None or not _close(other, found[0]) for other in found)

    def _compare(
        self,
        batch: Any,
        rows: int,
        pieces: Sequence[Piece],
        uneven: bool,
        pair: int | None = None,
        doubt: Doubt | None = None,
        alone: bool = False,
    ) -> bool:
        """Rule out what does not reproduce the loss of two neighbouring pieces taken together.

        ``pair`` is the first of the two, where their losses gave rise to ``doubt`` on some rank. Whether anything could
        be compared: losses that are not finite speak for no rule and against none. ``alone``: in runs for nothing else.
        """
        assert self._rules is not None
        whole, parts = self._question(batch, rows, pieces, uneven, pair)
        with ComparedConstants() as constants:
            expected, *results = self._run([whole, *parts], alone)
        losses = [float(result.loss) for result in (expected, *results) if result.loss is not None]
        if self._any([not all(map(math.isfinite, losses))])[0]:
            return False
        if not self._comparisons:
            self._add_rules(batch, rows, constants.found)
        self._compared_this_batch = True
        shares = [rule.weights(parts) for rule in self._rules]
        predicted = [_prediction(results, weights) for weights in shares]
        if len(losses) != 1 + len(results):
            raise RuntimeError("training_step returned no loss for some micro-batches; use microbatches=1")
        tolerance = self._tolerance(expected.loss)
        bound = tolerance * max(abs(loss) for loss in losses)
        wrong = self._any([value is None or not abs(value - losses[0]) <= bound for value in predicted])
        if all(wrong) and uneven and not alone:  # a step may compute something else where gradients are recorded
            return self._compare(batch, rows, pieces, uneven, pair, doubt, alone=True)
        if all(wrong):
            self._refuse(losses, predicted, doubt)
        left = [i for i, is_wrong in enumerate(wrong) if not is_wrong]
        self._comparisons += 1
        self._note_errors([float("inf") if value is None else abs(value - losses[0]) for value in predicted])
        if self._comparisons >= _MAX_COMPARISONS:
            rules = self._rules
            if self._low_precision() and len(left) > 1:
                names = " and ".join(f"'{rules[i].name}'" for i in left)
                rank_zero_warn(
                    f"lightning_effi: in 16 bits the losses of micro-batches do not tell {names} apart, and gradients"
                    " may differ; the closest is taken. Choose with Microbatches(weight=...) to be sure",
                    category=UserWarning,
                )
            left = [min(left, key=lambda i: self._errors[rules[i].name])]
        self._rules = [self._rules[i] for i in left]
        kept = shares[left[0]]
        assert kept is not None
        parts_rows = [part.rows for part in parts]
        self._log_rules.learn(expected.logged, [result.logged for result in results], kept, parts_rows, tolerance)
        return True

    def _add_rules(self, batch: Any, rows: int, constants: set[int]) -> None:
        """Labels may be ignored by another number than the configured one: the step itself tells which."""
        assert self._rules is not None
        if self._agreement is not None:
            constants = set().union(*self._agreement.gather(constants))
        names = {rule.name for rule in self._rules}
        if self._config.weight == "auto":
            found = self._common(candidates(self._config, batch, rows, sorted(constants)))
            self._rules = [*self._rules, *(rule for rule in found if rule.name not in names)]

    def _note_errors(self, errors: list[float]) -> None:
        assert self._rules is not None
        everybodys = [errors] if self._agreement is None else self._agreement.gather(errors)
        for rule, *found in zip(self._rules, *everybodys, strict=True):
            self._errors[rule.name] = self._errors.get(rule.name, 0.0) + sum(found)

    def _tolerance(self, loss: Tensor | None) -> float:
        """Relative rounding error of a loss; a wrong rule is usually off by more.

        The dtype is the loss's own, since models may compute it in fp32 whatever the precision of the run.
        """
        if self._low_precision():
            return 3e-3 if loss is None else max(3e-3, torch.finfo(loss.dtype).eps)
        return 1e-10 if loss is not None and loss.dtype == torch.float64 else 2e-5

    def _question(
        self, batch: Any, rows: int, pieces: Sequence[Piece], uneven: bool, pair: int | None
    ) -> tuple[Piece, Sequence[Piece]]:
        """Rows to run as a whole and in parts: no more than two pieces, which fit into memory without gradients."""
        if self._config.splitter is not None:  # only the splitter knows how pieces are joined
            return Piece(batch, 0, rows), pieces
        if uneven and self._first_question is not None:
            return self._first_question
        if uneven:  # at the first time also what only differs between pieces of different sizes
            first = pieces[0]
            stop = first.stop + max(1, first.rows // 2)
            return cut(batch, rows, 0, stop), [first, cut(batch, rows, first.stop, stop)]
        if pair is not None:
            two = list(pieces[pair : pair + 2])
        else:
            pairs = [list(pair) for pair in itertools.pairwise(pieces) if self._disagree(pair)]
            two = pairs[self._comparisons % len(pairs)] if pairs else list(pieces[:2])
        return cut(batch, rows, two[0].start, two[1].stop), two

    def _refuse_to_join(self, batch: Any, pieces: Sequence[Piece]) -> None:
        """A batch that is a list of micro-batches cannot be given to ``training_step`` as a whole."""
        if isinstance(batch, (list, tuple)) and any(piece.data is item for piece in pieces for item in batch):
            raise ValueError(
                "microbatches: a batch that is a list of micro-batches already has no uncut form with which their"
                ' losses could be compared. Say how to weight them: Microbatches(weight="samples" | "uniform" |'
                ' "package.function")'
            )

    def _refuse(self, losses: list[float], predicted: list[float | None], doubt: Doubt | None) -> None:
        assert self._rules is not None
        tried = ", ".join(
            f"{rule.name} {value:.6g}" for rule, value in zip(self._rules, predicted, strict=True) if value is not None
        )
        seen = "" if doubt is None else f" What was seen of the loss: {doubt.reason}."
        raise RuntimeError(
            "microbatches: the loss of a batch is not made up of the losses of its micro-batches: it is"
            f" {losses[0]:.6g}, and by {tried}. Either training_step compares the samples of a batch with each other"
            " (an in-batch contrastive loss, batch statistics), or it draws random numbers for its rows otherwise than"
            f" by torch's functions, or it ignores labels other than ignore_index.{seen} Use microbatches=1, or say how"
            ' to weight them: Microbatches(weight="samples" | "uniform" | "valid_labels" | "package.function",'
            " ignore_index=...)"
        )


def _prediction(results: Sequence[StepResult], weights: Sequence[float] | None) -> float | None:
    if weights is None:
        return None
    losses: list[Tensor | None] = [result.loss for result in results]
    return sum(float(loss) * w for loss, w in zip(losses, weights, strict=True) if w and loss is not None)


def _close(a: Sequence[float], b: Sequence[float] | None) -> bool:
    return b is not None and all(abs(x - y) <= 1e-9 * max(abs(x), abs(y), 1.0) for x, y in zip(a, b, strict=True))
