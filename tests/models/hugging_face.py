"""Models of the transformers library, built from tiny configurations; each computes its loss itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from tests.models.base import ExampleModule, OptimizerName

VOCABULARY = 23
LENGTH = 10
PADDING = 0
IGNORED = -100


class LanguageModel(ExampleModule):
    """The smallest common shape: ``self.model(**batch).loss``."""

    def __init__(
        self, model: PreTrainedModel, optimizer: OptimizerName = "sgd", learning_rate: float | None = None
    ) -> None:
        super().__init__(optimizer, learning_rate)
        self.model = model

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return self.model(**batch).loss


def llama_model(blocks: int = 4) -> LlamaForCausalLM:
    """Rotary positions, RMSNorm, gated MLP, 4 heads on 2 key/value heads, untied head."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=blocks,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=LENGTH,
            initializer_range=0.1,
            use_cache=False,
        )
    )


def llama(blocks: int = 4, **settings: Any) -> LanguageModel:
    return LanguageModel(llama_model(blocks), **settings)


def gpt2(**settings: Any) -> LanguageModel:
    """Conv1D projections and a head tied to the embedding."""
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=LENGTH,
        n_embd=32,
        n_layer=4,
        n_head=4,
        initializer_range=0.1,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=1,
        eos_token_id=1,
        use_cache=False,
    )
    return LanguageModel(GPT2LMHeadModel(config), **settings)


def bert(blocks: int = 4, **settings: Any) -> LanguageModel:
    """Masked language model with token types, padding and a tied decoder."""
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=blocks,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=LENGTH,
        initializer_range=0.1,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return LanguageModel(BertForMaskedLM(config), **settings)


def causal_batches(count: int, rows: int = 2, seed: int = 3) -> list[dict[str, Tensor]]:
    """Keyword inputs ``input_ids``, ``attention_mask`` (right padding) and ``labels`` (-100 on padding)."""
    generator = torch.Generator().manual_seed(seed)
    result = []
    for _ in range(count):
        lengths = torch.randint(4, LENGTH + 1, (rows, 1), generator=generator)
        mask = torch.arange(LENGTH) < lengths
        tokens = torch.randint(1, VOCABULARY, (rows, LENGTH), generator=generator).masked_fill(~mask, PADDING)
        labels = tokens.masked_fill(~mask, IGNORED)
        result.append({"input_ids": tokens, "attention_mask": mask.long(), "labels": labels})
    return result


def masked_batches(count: int, rows: int = 2, seed: int = 4) -> list[dict[str, Tensor]]:
    """As :func:`causal_batches`, with token types, and labels on the first and a third of the other tokens only."""
    generator = torch.Generator().manual_seed(seed)
    result = []
    for batch in causal_batches(count, rows, seed):
        chosen = torch.rand(rows, LENGTH, generator=generator) < 1 / 3
        chosen[:, 0] = True
        token_types = (torch.arange(LENGTH) >= LENGTH // 2).long().expand(rows, -1).clone()
        labels = batch["labels"].masked_fill(~chosen, IGNORED)
        result.append({**batch, "token_type_ids": token_types, "labels": labels})
    return result
