"""Frozen models with trainable low-rank adapters: written by hand, and made by peft."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.models.base import OptimizerName
from tests.models.gpt import GPT

RANK = 2


class LoRALinear(nn.Module):
    """A frozen linear layer plus a trainable product of rank ``RANK``."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, RANK, bias=False)
        self.up = nn.Linear(RANK, base.out_features, bias=False)
        # Zero, as in the paper, would leave `down` without a gradient in the first step: nothing to compare.
        nn.init.normal_(self.up.weight, std=0.2)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class LoRAGPT(GPT):
    """The tied GPT, frozen, with adapters on qkv and on the output projection of every block."""

    def __init__(self, optimizer: OptimizerName = "sgd", learning_rate: float | None = None) -> None:
        super().__init__(tied=True, optimizer=optimizer, learning_rate=learning_rate)
        self.requires_grad_(False)
        for block in self.blocks:
            block.attention.qkv = LoRALinear(block.attention.qkv)
            block.attention.proj = LoRALinear(block.attention.proj)


def peft_llama(**settings: Any) -> Any:
    """Llama with adapters that peft puts on the query and value projections."""
    from peft import LoraConfig, get_peft_model

    from tests.models.hugging_face import LanguageModel, llama_model

    config = LoraConfig(r=RANK, lora_alpha=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = get_peft_model(llama_model(), config)
    # peft draws them so small (0.02 or less) that updates drown in rounding.
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.3)
    return LanguageModel(model, **settings)
