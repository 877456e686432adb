"""The share of each piece of a batch in the batch's loss.

``loss of the batch = sum of weight * loss of the piece``. Which weights make this true depends on how ``training_step``
averages: over samples, over labels that are not ignored, not at all. Each way is a rule that counts something in each
piece. With ``"auto"`` every rule is a candidate until a comparison with an uncut batch rules it out, and as long as
several are left, a batch for which they disagree is compared before it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from lightning_effi.config import Microbatches
from lightning_effi.microbatches.split import Piece, tensors

# Functions that leave out labels, or ask which integers are a given one.
_IGNORING = {F.cross_entropy, F.nll_loss}
_COMPARING = {
    getattr(holder, name)
    for holder, names in ((Tensor, ("eq", "ne", "__eq__", "__ne__")), (torch, ("eq", "ne")))
    for name in names
}


@dataclass(frozen=True)
class Rule:
    """Counts what a piece contributes.

    Attributes:
        name: as a user would say it.
        amount: what is counted in a piece.
        normalized: weights are shares of the whole (a mean); otherwise the amounts themselves (a sum).
        labels: name of the tensor whose entries are counted, if that is what the rule does.
    """

    name: str
    amount: Callable[[Piece], Tensor | float]
    normalized: bool = True
    labels: str | None = None

    def weights(self, pieces: Sequence[Piece]) -> list[float] | None:
        """One weight a piece; ``None`` where the rule does not apply to such a batch."""
        try:
            amounts = torch.stack([torch.as_tensor(self.amount(piece), dtype=torch.float64) for piece in pieces])
        except KeyError:  # this batch has no such tensor
            return None
        if not self.normalized:
            return amounts.tolist()
        total = amounts.sum()
        if bool((amounts < 0).any()) or not bool(torch.isfinite(total)):
            return None
        if not bool(total):  # nothing is counted in any piece: the loss of the whole batch is 0 / 0, too
            return [1.0 / len(pieces)] * len(pieces)
        return (amounts / total).tolist()


def fixed_rule(config: Microbatches) -> Callable[[Sequence[Piece]], list[float]] | None:
    """The weights of a rule that needs no comparison; ``None`` for ``"auto"`` and ``"valid_labels"``."""
    if config.weight in ("auto", "valid_labels"):
        return None
    for rule in (SAMPLES, UNIFORM):
        if config.weight == rule.name:
            return lambda pieces, rule=rule: rule.weights(pieces)  # type: ignore[misc, return-value]
    function = resolve_name(config.weight)

    def call(pieces: Sequence[Piece]) -> list[float]:
        weights = [float(weight) for weight in function([piece.data for piece in pieces])]
        if len(weights) != len(pieces):
            raise ValueError(f"{config.weight} returned {len(weights)} weights for {len(pieces)} micro-batches")
        return weights

    return call


def candidates(config: Microbatches, batch: Any, rows: int, constants: Sequence[int] = ()) -> list[Rule]:
    """The rules that may hold for batches like this one, the likeliest first.

    ``constants`` are numbers that the step compares integers with, or ignores among labels.
    """
    laid_out = {name: t for name, t in tensors(batch).items() if t.dim() and t.shape[0] == rows}
    labels = [name for name in laid_out if name.rpartition(".")[2] == config.labels_key]
    named = [
        rule for name in labels for rule in _label_rules(name, laid_out[name], config.ignore_index, "valid_labels")
    ]
    if config.weight == "valid_labels":
        if not named:
            raise ValueError(
                f"microbatches: weight='valid_labels' looks for labels_key={config.labels_key!r} in the batch, which"
                f" has {', '.join(map(repr, laid_out)) or 'no tensors'}. Set labels_key to one of these"
            )
        return named
    others: list[Rule] = []
    for name, tensor in laid_out.items():
        if tensor.is_floating_point():
            if tensor.dim() <= 2:  # a mask or one weight a sample
                others.append(Rule(f"the sum of '{name}'", partial(_total, name)))
            continue
        if tensor.is_complex():
            continue
        for ignored in sorted({config.ignore_index, 0, *constants}):
            others += _label_rules(name, tensor, ignored, f"the entries of '{name}' other than {ignored}")
    return [SAMPLES, *named, *others, UNIFORM, SUM]


def _total(name: str, piece: Piece) -> Tensor:
    return tensors(piece.data)[name].sum()


def _label_rules(name: str, labels: Tensor, ignored: int, called: str) -> list[Rule]:
    """Counting all positions, and all but the first: a causal language model does not predict that one."""

    def counted(piece: Piece, first: int) -> Tensor:
        valid = tensors(piece.data)[name] != ignored
        return (valid[:, first:] if first else valid).sum()

    rules = [Rule(called, lambda piece: counted(piece, 0), labels=name)]
    if labels.dim() >= 2 and labels.shape[1] > 1:
        shifted = f"{called}, the first position left out"
        rules.insert(0, Rule(shifted, lambda piece: counted(piece, 1), labels=name))
    return rules


class ComparedConstants(TorchFunctionMode):
    """Notes the whole numbers that a step compares integers with, or has a loss ignore: a padding id, most likely."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[int] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _IGNORING:
            self._note(kwargs.get("ignore_index"))
        elif func in _COMPARING and isinstance(args[0], Tensor) and not args[0].is_floating_point():
            self._note(args[1] if len(args) > 1 else kwargs.get("other"))
        return func(*args, **kwargs)

    def _note(self, value: Any) -> None:
        if isinstance(value, Tensor) and value.dim() == 0 and not value.is_floating_point():
            value = value.item()
        if isinstance(value, int) and not isinstance(value, bool):
            self.found.add(value)


SAMPLES = Rule("samples", lambda piece: float(piece.rows))
UNIFORM = Rule("uniform", lambda piece: 1.0)
SUM = Rule("the sum over micro-batches", lambda piece: 1.0, normalized=False)
