"""How a loss was built from its entries, read from the scalar end of its autograd graph.

Whether pieces of a batch may be weighted by rows, or by labels, is decided by what the loss is divided by. That number
stands in the graph: a mean knows how many entries it had, ``nll_loss`` the labels that were not ignored, a division its
divisor. The walk follows scalars only, from the loss to the operators that reduce something larger to one of them, so
that it looks at a dozen nodes whatever the size of the model.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_effi.compat import torch as torch_compat

# How many operators next to the loss tell one way of building it from another.
_SIGNATURE_NODES = 40
# A stack of so few scalars is a list of terms; a longer one is a list of samples.
_MAX_TERMS = 8
_MEAN, _SUM = 1, 2  # torch's numbers for the reductions of its loss functions


@dataclass(frozen=True)
class Reduction:
    """One operator that makes a scalar of many entries.

    Attributes:
        kind: the operator, as autograd calls it.
        divisor: what its sum is divided by on the way to the loss; ``None`` where that cannot be seen.
        rounding: relative error of ``divisor``, which is counted in the loss's dtype.
    """

    kind: str
    divisor: float | None
    rounding: float = 0.0


@dataclass(frozen=True)
class LossEvidence:
    """What one piece's loss was built from.

    Attributes:
        signature: the operators next to the loss; other operators are another way of building it.
        reductions: in the order in which a walk from the loss meets them.
    """

    signature: tuple[str, ...]
    reductions: tuple[Reduction, ...]


def evidence_of(loss: Tensor) -> LossEvidence | None:
    """Read before backward, which frees what the graph holds; ``None`` for a loss without a graph."""
    if loss.grad_fn is None:
        return None
    found: list[tuple[str, Any]] = []
    _walk(loss.grad_fn, [], found)
    divisors = _as_numbers([divisor for _, divisor in found])
    reductions = tuple(
        Reduction(kind, divisor, _rounding(items)) for (kind, items), divisor in zip(found, divisors, strict=True)
    )
    # the walk may look further than the signature: reductions belong to it, so that those of one signature correspond
    return LossEvidence((*_signature(loss.grad_fn), *(reduction.kind for reduction in reductions)), reductions)


def _walk(node: Any, divisors: list[Any], found: list[tuple[str, Any]]) -> None:
    """Follow scalars from ``node`` to the reductions they come from.

    Args:
        node: one that gives a scalar.
        divisors: numbers and scalars that its result is divided by on the way to the loss.
        found: kinds of reductions with their divisors, ``None`` where one is unknown.
    """
    for child, index in node.next_functions:
        if child is None:
            continue
        size = torch_compat.output_size(child, index)
        if size == 1:
            _walk(child, divisors + _constant_divisors(node), found)
        elif child.name() in ("StackBackward0", "CatBackward0") and size <= _MAX_TERMS:
            own = _divisors_of(node, size)
            for term, term_index in child.next_functions:
                if term is not None and own is not None and torch_compat.output_size(term, term_index) == 1:
                    _walk(term, divisors + own, found)
        elif size > 1:
            own = _divisors_of(node, size)
            found.append((node.name(), None if own is None else divisors + own))
            return


def _divisors_of(node: Any, entries: int) -> list[Any] | None:
    """What a reduction of ``entries`` numbers divides their sum by; ``None`` where it does something else."""
    name = node.name()
    if name.startswith("MeanBackward"):
        return [entries]
    if name.startswith("SumBackward"):
        return []
    reduction = torch_compat.saved(node, "reduction")
    if name.startswith("NllLoss"):
        return [torch_compat.saved(node, "total_weight")] if reduction == _MEAN else []
    if reduction in (_MEAN, _SUM):
        return [entries] if reduction == _MEAN else []
    return None


def _constant_divisors(node: Any) -> list[Any]:
    """Constants by which ``node``, a function of scalars, divides; a factor is one over a divisor."""
    name, children = node.name(), node.next_functions
    if not name.startswith(("MulBackward", "DivBackward")) or all(child is not None for child, _ in children[:2]):
        other = torch_compat.saved(node, "other") if name in ("MulBackward1", "DivBackward1") else None
    else:
        other = torch_compat.saved(node, "other" if children[0][0] is not None else "self")
    if other is None or (isinstance(other, Tensor) and other.numel() != 1):
        return []
    return [other] if name.startswith("Div") else [_Inverse(other)]


@dataclass(frozen=True)
class _Inverse:
    value: Any


def _as_numbers(products: Sequence[list[Any] | None]) -> list[float | None]:
    """The product of each list; all scalars on a device are read with one wait for it."""
    flat = [item.value if isinstance(item, _Inverse) else item for items in products for item in items or ()]
    scalars = [item.detach().reshape(()).to(torch.float64) for item in flat if isinstance(item, Tensor)]
    read = iter(torch.stack(scalars).tolist() if scalars else ())
    numbers = iter([next(read) if isinstance(item, Tensor) else float(item) for item in flat])
    result: list[float | None] = []
    for items in products:
        if items is None:
            result.append(None)
            continue
        product = 1.0
        for item in items:
            number = next(numbers)
            if not isinstance(item, _Inverse):
                product *= number
            elif number:
                product /= number
            else:  # a term that is switched off counts nothing
                product = math.inf
        result.append(product)
    return result


def _rounding(items: list[Any] | None) -> float:
    values = [item.value if isinstance(item, _Inverse) else item for item in items or ()]
    dtypes = {value.dtype for value in values if isinstance(value, Tensor) and value.is_floating_point()}
    return max((torch.finfo(dtype).eps for dtype in dtypes), default=0.0)


def _signature(root: Any) -> tuple[str, ...]:
    names: list[str] = []
    queue, seen = deque([root]), {root}
    while queue and len(names) < _SIGNATURE_NODES:
        node = queue.popleft()
        names.append(node.name())
        for child, _ in node.next_functions:
            if child is not None and child not in seen:
                seen.add(child)
                queue.append(child)
    return tuple(names)
