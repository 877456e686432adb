"""Both ends of a language model over a vocabulary that is split: embedding tables, and the loss of logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_effi.tensor_parallel.collectives import TensorGroup, part_of, reduce
from lightning_effi.tensor_parallel.cross_entropy import PartialCrossEntropy, soft_cross_entropy
from lightning_effi.tensor_parallel.rules.wholes import run_on_wholes
from lightning_effi.tensor_parallel.split import SplitTensor, whole_shape

Args = tuple[Any, ...]
Kwargs = dict[str, Any]

_EMBEDDING = ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
_CROSS_ENTROPY = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")

_loss_listeners: list[Callable[[], None]] = []


def embedding(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """``F.embedding(tokens, weight [V, D])`` with rows of ``weight`` on each rank: the sum of what each one has."""
    given = dict(zip(_EMBEDDING, args, strict=False)) | kwargs
    tokens, weight = given["input"], given["weight"]
    if not isinstance(tokens, SplitTensor) or tokens.placement.dim is not None or not hasattr(weight, "device_mesh"):
        return run_on_wholes(func, args, kwargs)
    if given.get("max_norm") is not None or given.get("scale_grad_by_freq") or given.get("sparse"):
        return run_on_wholes(func, args, kwargs)
    return embedded(tokens.as_subclass(Tensor), weight, given.get("padding_idx"), tokens.placement.group)


def embedded(tokens: Tensor, weight: Any, padding: int | None, group: TensorGroup) -> Tensor:
    """Rows of a table of which this rank holds a part.

    Args:
        tokens: row numbers, of any shape; replicated.
        weight: DTensor ``[V, D]``, split in its first dim.
        padding: the row that gets no gradient.
        group: among whom it is split.

    Raises:
        IndexError: for row numbers that the table does not have, from ``F.embedding`` and on all ranks.
    """
    extent = weight.shape[0]
    start, rows = part_of(extent, group.rank, group.size)
    foreign = _foreign(tokens, start, rows, extent)
    if padding is not None:
        padding = (padding + extent if padding < 0 else padding) - start
        padding = padding if 0 <= padding < rows else None
    found = F.embedding(torch.where(foreign, 0, tokens - start), weight.to_local(), padding)
    return reduce(found.masked_fill_(foreign[..., None], 0), group)


def _foreign(index: Tensor, start: int, rows: int, extent: int) -> Tensor:
    """Where ``index`` points to another rank's rows. What points nowhere is left for the lookup to complain about."""
    return ((index < start) & (index >= 0)) | ((index >= start + rows) & (index < extent))


def cross_entropy(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """``F.cross_entropy`` of logits whose classes are split; the result is replicated."""
    given = dict(zip(_CROSS_ENTROPY, args, strict=False)) | kwargs
    logits, target, weight = given["input"], given["target"], given.get("weight")
    classes = min(1, logits.dim() - 1)
    if (
        not isinstance(logits, SplitTensor)
        or logits.placement.dim != classes
        or not logits.placement.is_contiguous
        or isinstance(target, SplitTensor)
        or given.get("size_average") is not None
        or given.get("reduce") is not None
        or hasattr(weight, "device_mesh")
        or not _fits(logits, target)
    ):
        return run_on_wholes(func, args, kwargs)
    for listener in _loss_listeners:
        listener()
    split = logits.placement
    smoothing, reduction = given.get("label_smoothing", 0.0), given.get("reduction", "mean")
    plain = logits.as_subclass(Tensor).movedim(classes, -1)
    precise = plain.float() if plain.dtype.itemsize < 4 else plain
    weight = None if weight is None else weight.to(precise.dtype)
    device = plain.device.type
    dtype = precise.dtype if torch.is_autocast_enabled(device) else plain.dtype
    with torch.autocast(device, enabled=False):
        if target.is_floating_point():
            losses, divisor = soft_cross_entropy(precise, target.movedim(classes, -1), weight, smoothing, split)
        else:
            ignored = target == given.get("ignore_index", -100)
            losses, divisor = PartialCrossEntropy.apply(precise, target, ignored, weight, smoothing, split)
    return _reduced(losses, divisor, reduction).to(dtype)


@contextmanager
def on_loss(listener: Callable[[], None]) -> Iterator[None]:
    """Inside, ``listener()`` is called whenever a loss is computed over split classes."""
    _loss_listeners.append(listener)
    try:
        yield
    finally:
        _loss_listeners.remove(listener)


def _fits(logits: SplitTensor, target: Tensor) -> bool:
    """Whether the shapes are right; torch names what is wrong with those that are not."""
    shape = list(whole_shape(logits))
    if target.is_floating_point():
        return list(target.shape) == shape
    return list(target.shape) == [n for dim, n in enumerate(shape) if dim != logits.placement.dim]


def _reduced(losses: Tensor, divisor: Tensor | int, reduction: str) -> Tensor:
    if reduction == "none":
        return losses
    if reduction not in ("sum", "mean"):
        raise ValueError(f"{reduction} is not a valid value for reduction")
    return losses.sum() / divisor if reduction == "mean" else losses.sum()


RULES: dict[str, Any] = {"embedding": embedding, "cross_entropy": cross_entropy}
