"""What a step logs and returns, piece by piece, put together to what the whole batch would have logged and returned."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_effi.microbatches.evidence import LossEvidence

if TYPE_CHECKING:
    import lightning.pytorch as pl


@dataclass
class Logged:
    """One call of ``self.log``: the value, detached, and the other arguments."""

    name: str
    value: Any
    arguments: dict[str, Any]

    @property
    def is_number(self) -> bool:
        return isinstance(self.value, (int, float)) or (isinstance(self.value, Tensor) and self.value.numel() == 1)


@dataclass
class StepResult:
    """What ``training_step`` made of one piece: its loss, the rest of its output, what it logged, and, where it is
    trained on, how the loss was built.
    """

    loss: Tensor | None
    output: Any
    logged: list[Logged] = field(default_factory=list)
    evidence: LossEvidence | None = None


@contextmanager
def captured_logs(module: pl.LightningModule) -> Iterator[list[Logged]]:
    """Inside, what ``self.log`` and ``self.log_dict`` are given is only noted.

    Lightning would take each call for a batch of its own, and on a pipeline stage the values are placeholders. A
    module may have a ``log`` of its own, which renames or filters and then calls Lightning's: so it is Lightning's
    method that is replaced, for this module, and put back on leaving.
    """
    calls: list[Logged] = []
    base = _lightning_class(module)
    original = base.log
    signature = inspect.signature(original)

    @functools.wraps(original)
    def note(self: Any, *args: Any, **kwargs: Any) -> None:
        if self is not module:
            return original(self, *args, **kwargs)
        arguments = signature.bind(self, *args, **kwargs).arguments
        del arguments["self"]
        name, value = arguments.pop("name"), arguments.pop("value")
        calls.append(Logged(name, value.detach() if isinstance(value, Tensor) else value, dict(arguments)))
        return None

    base.log = note
    try:
        yield calls
    finally:
        base.log = original


def log_all(module: pl.LightningModule, calls: Iterable[Logged]) -> None:
    """Hand Lightning what :func:`captured_logs` has noted, of pieces put together."""
    log = _lightning_class(module).log
    for call in calls:
        log(module, call.name, call.value, **call.arguments)


def _lightning_class(module: pl.LightningModule) -> Any:
    """The class whose ``log`` is Lightning's own, behind what users override."""
    return next(kind for kind in reversed(type(module).__mro__) if "log" in vars(kind))


class LogRules:
    """How each logged name is combined over pieces.

    A mean follows the weights of the loss, unless a comparison with an uncut batch (:meth:`learn`) showed another way.
    """

    def __init__(self) -> None:
        self._rules: dict[str, str] = {}
        self._constant_batch_size: dict[str, bool] = {}

    def combine(
        self, pieces: Sequence[Sequence[Logged]], weights: Sequence[float], rows: Sequence[int]
    ) -> list[Logged]:
        """The calls of ``self.log`` that the whole batch would have made, in their order."""
        combined = []
        for key, calls in _by_key(pieces).items():
            present = list(calls)
            first = calls[present[0]]
            arguments = dict(first.arguments)
            if arguments.get("batch_size") is not None:
                sizes = [int(calls[i].arguments["batch_size"]) for i in present]
                arguments["batch_size"] = self._batch_size(key[0], sizes, [rows[i] for i in present])
            value = first.value
            if first.is_number and len(pieces) > 1:
                rule = self._rules.get(key[0]) or _default_rule(first)
                shares = [weights[i] for i in present]
                if len(present) < len(pieces) and any(shares):  # logged under a condition: the mean of those that did
                    shares = [share / math.fsum(shares) for share in shares]
                value = _apply(rule, [calls[i].value for i in present], shares, [rows[i] for i in present])
            combined.append(Logged(first.name, value, arguments))
        return combined

    def learn(
        self,
        whole: Sequence[Logged],
        pieces: Sequence[Sequence[Logged]],
        weights: Sequence[float],
        rows: Sequence[int],
        tolerance: float,
    ) -> None:
        """Find for each name the way of combining the pieces' values that gives the whole batch's."""
        calls = _by_key(pieces)
        for key, (expected,) in ((key, tuple(found.values())) for key, found in _by_key([whole]).items()):
            parts = calls.get(key, {})
            if not expected.is_number or len(parts) != len(pieces):
                continue
            size = expected.arguments.get("batch_size")
            if size is not None:
                sizes = {int(call.arguments["batch_size"]) for call in parts.values()}
                self._constant_batch_size[key[0]] = sizes == {int(size)}
            values = [call.value for call in parts.values()]
            rules = dict.fromkeys([_default_rule(expected), "loss", "rows", "sum", "max", "min", "last"])
            fitting = [r for r in rules if _close(_apply(r, values, weights, rows), expected.value, tolerance)]
            if fitting:
                self._rules[key[0]] = fitting[0]
            else:
                rank_zero_warn(
                    f"lightning_effi: the logged value '{key[0]}' of a batch is no mean, sum or extreme of the values"
                    " of its micro-batches. What is logged is their mean, which differs from that of the whole batch."
                    " Log it from a torchmetrics metric, or in a hook outside training_step"
                )

    def _batch_size(self, name: str, sizes: Sequence[int], rows: Sequence[int]) -> int:
        constant = self._constant_batch_size.get(name)
        if constant is None:
            constant = len(set(sizes)) == 1 and list(sizes) != list(rows)
        return sizes[0] if constant else sum(sizes)


def combine_outputs(results: Sequence[StepResult], weights: Sequence[float], rows: Sequence[int]) -> dict[str, Any]:
    """What ``training_step`` returned besides the loss: rows are joined, scalars averaged with the loss's weights.

    Raises:
        RuntimeError: for a value that is neither, naming its key.
    """
    outputs = [result.output for result in results]
    if not isinstance(outputs[0], Mapping):
        return {}
    return {key: _join(key, [output[key] for output in outputs], weights, rows) for key in outputs[0] if key != "loss"}


def weighted_sum(values: Sequence[Tensor | float], weights: Sequence[float]) -> Any:
    """``sum(w * v)``, where a piece of weight zero does not count even if its value is not a number."""
    return sum(value * weight for value, weight in zip(values, weights, strict=True) if weight)


def _join(key: str, values: list[Any], weights: Sequence[float], rows: Sequence[int]) -> Any:
    first = values[0]
    if isinstance(first, Tensor) and first.dim() and [len(value) for value in values] == list(rows):
        return torch.cat([value.detach() for value in values])
    if isinstance(first, Tensor) and first.numel() == 1 and first.is_floating_point():
        return weighted_sum([value.detach() for value in values], weights)
    if isinstance(first, list) and [len(value) for value in values] == list(rows):
        return [item for value in values for item in value]
    if not isinstance(first, Tensor) and all(value == first for value in values):
        return first
    raise RuntimeError(
        f"training_step returned '{key}' ({type(first).__name__}), which cannot be put together from micro-batches: it"
        " is no tensor or list with one row a sample, no floating-point scalar, and not the same for all. Leave it out"
        " of the returned dict, or use microbatches=1"
    )


def _by_key(pieces: Sequence[Sequence[Logged]]) -> dict[tuple[str, int], dict[int, Logged]]:
    """For each name (and its how-manieth call in a step), the call of each piece that made one."""
    calls: dict[tuple[str, int], dict[int, Logged]] = {}
    for index, piece in enumerate(pieces):
        seen: dict[str, int] = {}
        for call in piece:
            number = seen[call.name] = seen.get(call.name, 0) + 1
            calls.setdefault((call.name, number), {})[index] = call
    return calls


def _default_rule(call: Logged) -> str:
    reduce = call.arguments.get("reduce_fx", "mean")
    name = reduce if isinstance(reduce, str) else getattr(reduce, "__name__", "mean")
    return {"sum": "sum", "max": "max", "min": "min"}.get(name, "loss")


def _apply(rule: str, values: Sequence[Any], weights: Sequence[float], rows: Sequence[int]) -> Any:
    match rule:
        case "sum":
            return weighted_sum(values, [1.0] * len(values))
        case "max":
            return max(values)
        case "min":
            return min(values)
        case "last":
            return values[-1]
        case "rows":
            return weighted_sum(values, [count / sum(rows) for count in rows])
        case _:
            return weighted_sum(values, weights)


def _close(a: Any, b: Any, tolerance: float) -> bool:
    return math.isclose(float(a), float(b), rel_tol=tolerance, abs_tol=1e-12)
