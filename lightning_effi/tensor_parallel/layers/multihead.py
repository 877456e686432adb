"""``nn.MultiheadAttention`` with split heads.

Torch computes it in one function that folds batch and heads into one dim. Here the same computation keeps heads in a
dim of their own, in terms of functions that have rules.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_effi.compat import torch as torch_compat
from lightning_effi.tensor_parallel.rules.layers import column_output, stored_to_used
from lightning_effi.tensor_parallel.split import CannotSplitError


def multi_head_attention_forward(
    query: Any,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Any,
    in_proj_bias: Any,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Any,
    out_proj_bias: Any,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """``F.multi_head_attention_forward`` for ``[length, rows, width]``; arguments and results as there.

    ``query`` is the input of a split attention: a split tensor that names its column-wise layer.
    """
    if query.dim() != 3 or use_separate_proj_weight or bias_k is not None or add_zero_attn or static_k is not None:
        raise CannotSplitError("this form of nn.MultiheadAttention (unbatched, other key width, bias_k) has no rule")
    _length, rows, width = query.shape
    column = query.placement.column
    q, k, v = _projected(query, key, value, in_proj_weight, in_proj_bias)
    q, k, v = (t.unflatten(-1, (num_heads, width // num_heads)).permute(1, 2, 0, 3) for t in (q, k, v))
    causal = is_causal and key_padding_mask is None and not need_weights
    mask = None if causal else _mask(attn_mask, key_padding_mask, rows, num_heads, q.dtype)
    dropout_p = dropout_p if training else 0.0
    weights = None
    if need_weights:
        scores = q @ k.transpose(-2, -1) * (1 / math.sqrt(width // num_heads))
        weights = (scores if mask is None else scores + mask).softmax(dim=-1)
        weights = F.dropout(weights, dropout_p) if dropout_p else weights
        output = weights @ v
        weights = weights.mean(dim=1) if average_attn_weights else weights
    else:
        output = F.scaled_dot_product_attention(q, k, v, mask, dropout_p, is_causal=causal)
    output = output.permute(2, 0, 1, 3).flatten(2)
    output.placement = replace(output.placement, partial=column.partial)
    return F.linear(output, out_proj_weight, out_proj_bias), weights


def _projected(query: Any, key: Any, value: Any, weight: Any, bias: Any) -> tuple[Tensor, ...]:
    if query is key and key is value:
        return F.linear(query, weight, bias).chunk(3, dim=-1)
    with torch_compat.without_subclass_dispatch():
        column, group = query.placement.column, query.placement.group
        weights = stored_to_used(weight, 0, column, group).chunk(3)
        biases = (None,) * 3 if bias is None else stored_to_used(bias, 0, column, group).chunk(3)
        return tuple(
            column_output(F.linear(tensor, w, b), column, column.pieces[:1], group)
            for tensor, w, b in zip((query, key, value), weights, biases, strict=True)
        )


def _mask(attention: Tensor | None, padding: Tensor | None, rows: int, heads: int, dtype: torch.dtype) -> Tensor | None:
    """One additive mask that broadcasts to ``[rows, heads, queries, keys]``."""
    total = None
    if attention is not None:
        attention = attention.unflatten(0, (rows, heads)) if attention.dim() == 3 else attention
        total = _additive(attention, dtype)
    if padding is not None:
        padding = _additive(padding, dtype)[:, None, None, :]
        total = padding if total is None else total + padding
    return total


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(mask, -math.inf)


COMPOSED: dict[str, Any] = {"multi_head_attention_forward": multi_head_attention_forward}
