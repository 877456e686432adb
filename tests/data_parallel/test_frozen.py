"""Frozen and trainable parameters side by side, in one block and over time; adapters of another dtype."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import BaseFinetuning
from torch import Tensor, nn

from tests.harness import SGD_FP32, Training, train_and_assert_parity
from tests.harness.fitting import ALL_STAGES, Fit, assert_equals_single_process
from tests.models.gpt import CONTEXT, GPT, VOCABULARY
from tests.models.gpt import batches as token_batches


class Adapter(nn.Module):
    """fp32 adapter around a linear layer of the base's dtype."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)
        nn.init.normal_(self.up.weight, std=0.2)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x.to(self.down.weight.dtype))).to(x.dtype)


class AdaptersInFloat32(GPT):
    """The base is frozen and in bf16, the adapters are in fp32."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(width=8, heads=2, blocks=2, **settings)
        self.requires_grad_(False)
        self.to(torch.bfloat16)
        for block in self.blocks:
            block.attention.qkv = Adapter(block.attention.qkv)


class LastBlockOnly(GPT):
    def __init__(self) -> None:
        super().__init__(width=8, heads=2, blocks=3)
        self.requires_grad_(False)
        self.blocks[-1].requires_grad_(True)


class SmallGPT(GPT):
    def __init__(self) -> None:
        super().__init__(width=8, heads=2, blocks=3)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        # LambdaLR, which the GPT uses, cannot serve groups that are added later
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.5, momentum=0.9)


class UnfreezeInSecondEpoch(BaseFinetuning):
    """Only the last block trains in epoch 0; the first one and the embedding join in epoch 1."""

    def freeze_before_training(self, pl_module: pl.LightningModule) -> None:
        self.freeze(pl_module)
        pl_module.blocks[-1].requires_grad_(True)

    def finetune_function(self, pl_module: pl.LightningModule, epoch: int, optimizer: torch.optim.Optimizer) -> None:
        if epoch == 1:
            modules = [pl_module.blocks[0], pl_module.embedding]
            self.unfreeze_and_add_param_group(modules, optimizer, lr=0.25)


class OptimizerContents(pl.Callback):
    """At the end of training: names and dtypes of the parameters that have optimizer states."""

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        names = {id(parameter): name for name, parameter in pl_module.named_parameters()}
        state = trainer.optimizers[0].state
        self.observation = {names[id(p)]: str(entries["exp_avg"].dtype) for p, entries in state.items()}


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(VOCABULARY, (4, CONTEXT + 1), generator=generator) for _ in range(2)]


@ALL_STAGES
def test_float32_adapters_on_a_bfloat16_base_equal_single_process(zero_stage: int) -> None:
    training = Training(
        AdaptersInFloat32,
        token_batches,
        strategy={"zero_stage": zero_stage},
        world_size=2,
        steps=2,
        optimizer="adamw",
        callbacks=(OptimizerContents,),
        learning_rate=0.05,
    )
    record = train_and_assert_parity(training, SGD_FP32)
    adapters = {f"blocks.{i}.attention.qkv.{part}.weight" for i in range(2) for part in ("down", "up")}
    for [contents] in record.observations:
        assert contents == dict.fromkeys(adapters, "torch.float32")
    assert record.parameters[-1]["blocks.0.mlp.0.weight"].dtype == torch.bfloat16


@ALL_STAGES
def test_training_the_last_block_only_equals_single_process(zero_stage: int) -> None:
    outcomes = assert_equals_single_process(Fit(LastBlockOnly, batches, {"zero_stage": zero_stage}))
    assert all(name.startswith("blocks.2.") for name in outcomes[0].gradients[0])


@ALL_STAGES
def test_unfreezing_in_the_second_epoch_equals_single_process(zero_stage: int) -> None:
    run = Fit(
        SmallGPT,
        batches,
        {"zero_stage": zero_stage},
        callbacks=(UnfreezeInSecondEpoch,),
        trainer={"max_epochs": 2},
    )
    outcomes = assert_equals_single_process(run)
    first, second = (set(outcomes[0].gradients[step]) for step in (0, 2))
    assert all(name.startswith("blocks.2.") for name in first)
    assert second - first == {name for name in second if name.startswith(("blocks.0.", "embedding."))} != set()
