"""Attention over split heads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from lightning_effi.tensor_parallel.randomness import per_rank
from lightning_effi.tensor_parallel.split import CannotSplitError, Split, SplitTensor, aligned, wrap

Args = tuple[Any, ...]
Kwargs = dict[str, Any]

_NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")


def scaled_dot_product_attention(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """Heads are dim -3. Key/value heads that are not split (fewer than ranks) are matched to this rank's queries."""
    from lightning_effi.tensor_parallel.rules import fall_back

    given = dict(zip(_NAMES, args, strict=False)) | kwargs
    query = given["query"]
    if not isinstance(query, SplitTensor):
        heads = [given[key] for key in ("key", "value") if isinstance(given[key], SplitTensor)]
        if not heads or query.dim() < 3 or heads[0].placement.dim != heads[0].dim() - 3:
            return fall_back(func, args, kwargs)
        split = heads[0].placement
        # queries that are not split follow their keys
        whole = split.at(query.dim() - 3, (query.shape[-3],))
        query = given["query"] = wrap(aligned(query, whole, 3), whole)
    split = query.placement
    if split.dim != query.dim() - 3 or not split.is_contiguous:
        return fall_back(func, args, kwargs)
    for key in ("key", "value"):
        given[key] = _heads_of(given[key], split)
    if given["key"].shape[-3] == query.shape[-3]:
        given.pop("enable_gqa", None)
    mask = given.get("attn_mask")
    if isinstance(mask, Tensor):
        given["attn_mask"] = aligned(mask, split, 3)
    if given.get("dropout_p", 0.0) > 0.0:
        with per_rank(split.group.rank, query.device):
            return wrap(func(**given), split)
    return wrap(func(**given), split)


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
