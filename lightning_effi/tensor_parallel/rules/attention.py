"""Attention over split heads."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_effi.tensor_parallel.randomness import own_draws
from lightning_effi.tensor_parallel.rules.draws import part_of_noise
from lightning_effi.tensor_parallel.rules.wholes import run_on_wholes
from lightning_effi.tensor_parallel.split import CannotSplitError, Split, SplitTensor, aligned, wrap

Args = tuple[Any, ...]
Kwargs = dict[str, Any]

_NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")


def scaled_dot_product_attention(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """Heads are dim -3. Key/value heads that are not split (fewer than ranks) are matched to this rank's queries."""
    given = dict(zip(_NAMES, args, strict=False)) | kwargs
    query = given["query"]
    if not isinstance(query, SplitTensor):
        heads = [given[key] for key in ("key", "value") if isinstance(given[key], SplitTensor)]
        if not heads or query.dim() < 3 or heads[0].placement.dim != heads[0].dim() - 3:
            return run_on_wholes(func, args, kwargs)
        split = heads[0].placement
        # queries that are not split follow their keys
        whole = split.at(query.dim() - 3, (query.shape[-3],))
        query = given["query"] = wrap(aligned(query, whole, 3), whole)
    split = query.placement
    if split.dim != query.dim() - 3 or not split.is_contiguous:
        return run_on_wholes(func, args, kwargs)
    for key in ("key", "value"):
        given[key] = _heads_of(given[key], split)
    if given["key"].shape[-3] == query.shape[-3]:
        given.pop("enable_gqa", None)
    mask = given.get("attn_mask")
    if isinstance(mask, Tensor):
        given["attn_mask"] = aligned(mask, split, 3)
    if not given.get("dropout_p", 0.0):
        return wrap(func(**given), split)
    if query.device.type == "cuda":
        with own_draws(split.group.rank, query.device, split.size / query.shape[-3]):
            return wrap(func(**given), split)
    given.pop("enable_gqa", None)
    return wrap(_with_dropout(split=split, **given), split)


def _with_dropout(
    split: Split,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Torch's own composition for CPUs, with this rank's part of the mask that one process draws.

    ``split`` is that of ``query [..., heads, positions, width]``; ``key`` and ``value`` may have fewer heads.
    """
    plain = [t.as_subclass(Tensor) for t in (query, key, value)]
    precise = torch.float32 if query.dtype.itemsize < 4 else query.dtype
    with torch.autocast(query.device.type, enabled=False):
        q, k, v = (t.to(precise).repeat_interleave(query.shape[-3] // t.shape[-3], -3) for t in plain)
        root = math.sqrt(q.shape[-1] ** -0.5 if scale is None else scale)
        scores = (q * root) @ (k * root).mT
        hidden = torch.ones_like(scores[..., :1, :, :], dtype=torch.bool).triu(1) if is_causal else None
        if attn_mask is not None:
            attn_mask = attn_mask.as_subclass(Tensor)
            hidden = ~attn_mask if attn_mask.dtype == torch.bool else None
            scores = scores if hidden is not None else scores + attn_mask
        if hidden is not None:
            scores = scores.masked_fill(hidden, -math.inf)
        # a query that sees nothing has weights of zero
        blind = scores.isneginf().all(-1, keepdim=True)
        weights = scores.masked_fill(blind, 0.0).softmax(-1).masked_fill(blind, 0.0)
        noise = part_of_noise(weights, split, dropout_p, weights.dim() - 3)
        return (weights * noise @ v).to(query.dtype)


def _heads_of(tensor: Tensor, split: Split) -> Tensor:
    """The key or value heads that this rank's queries look at."""
    if isinstance(tensor, SplitTensor):
        if tensor.placement.dim != tensor.dim() - 3 or not tensor.placement.is_contiguous:
            raise CannotSplitError("keys or values are not split by heads", tensor.placement.sources)
        return tensor
    heads = tensor.shape[-3]
    whole = tensor if heads == split.size else tensor.repeat_interleave(split.size // heads, dim=-3)
    return aligned(whole, split, 3)


RULES: dict[str, Any] = {"scaled_dot_product_attention": scaled_dot_product_attention}
