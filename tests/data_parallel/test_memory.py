"""Bytes that a rank holds, counted over storages, are those of the ZeRO paper and those that the plan announces."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_effi import EffiPrecision
from lightning_effi.compat import fsdp as fsdp_compat
from tests.harness import make_trainer, run_distributed
from tests.models.gpt import GPT
from tests.models.gpt import batches as token_batches
from tests.models.lora import LoRALinear

REPOSITORY = Path(__file__).resolve().parents[2]
SETUP_SCRIPT = Path(__file__).with_name("setup_on_gpu.py")
WIDTH, BLOCKS = 64, 6  # wide enough that what cannot be divided (a vocabulary of 17) is far below one percent


class LargerGPT(GPT):
    def __init__(self) -> None:
        super().__init__(width=WIDTH, heads=4, blocks=BLOCKS)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-3)


class LoRA(LargerGPT):
    """One percent of the parameters is trainable."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        for block in self.blocks:
            block.attention.proj = LoRALinear(block.attention.proj)


def bytes_of(tensors: Iterable[Tensor | None]) -> int:
    """Bytes of all storages behind local tensors, each once."""
    storages = {}
    for tensor in tensors:
        if tensor is not None:
            storage = (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


class CountsBytes(pl.Callback):
    """By moment and kind, from the second accumulation window on (optimizer states exist then)."""

    def __init__(self) -> None:
        self.counts: dict[str, dict[str, int]] = {}
        self.planned: dict[str, int] = {}
        self.parameters = 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.parameters = sum(parameter.numel() for parameter in pl_module.parameters())
        self.planned = dict(trainer.strategy.plan.bytes_per_rank)

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.global_step == 1 and "inside window" not in self.counts:
            self.counts["inside window"] = self._count(trainer)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        if trainer.global_step == 2:
            self.counts["between steps"] = self._count(trainer)

    def _count(self, trainer: pl.Trainer) -> dict[str, int]:
        # the engine's own root, since gathered parameters and unreduced gradients are in no module
        params = [param for group in fsdp_compat.groups(trainer.strategy.engine.root) for param in group.fsdp_params]
        shards = [fsdp_compat.sharded_param(param) for param in params]
        full = [fsdp_compat.unsharded_param(param) for param in params]
        gathered = [*full, *(buffer for param in params for buffer in param.all_gather_outputs)]
        unreduced = [
            *(param.unsharded_accumulated_grad for param in params),
            *(parameter.grad for parameter in full if parameter is not None),
        ]
        states = [v for entries in trainer.optimizers[0].state.values() for v in entries.values() if v.dim() > 0]
        return {
            "parameters": bytes_of(shards),
            "gathered parameters": bytes_of(gathered),
            "gradients": bytes_of([*unreduced, *(shard.grad for shard in shards)]),
            "optimizer states": bytes_of(states),
        }


def count_bytes(module: type[GPT], zero_stage: int, world_size: int) -> CountsBytes:
    counter = CountsBytes()
    trainer = make_trainer(
        {"zero_stage": zero_stage, "precision_plugin": EffiPrecision("bf16-true", master_weights=True)},
        world_size,
        callbacks=[counter],
        max_steps=2,
        accumulate_grad_batches=2,
        use_distributed_sampler=False,
    )
    trainer.fit(module(), torch.utils.data.DataLoader(token_batches(4), batch_size=None))
    return counter


@pytest.mark.parametrize(
    ("zero_stage", "world_size", "per_parameter"),
    # in stage 1 the gradients of a window add up in fp32 before they are sharded: 2 bytes more than in bf16
    [
        (1, 2, 12),
        (2, 2, 10),
        (3, 4, 4),
        *(pytest.param(*case, marks=pytest.mark.full) for case in [(3, 2, 8), (1, 4, 9), (2, 4, 6)]),
    ],
    ids=lambda value: str(value),
)
def test_bytes_per_parameter_with_master_weights_and_adam(zero_stage: int, world_size: int, per_parameter: int) -> None:
    for counter in run_distributed(count_bytes, world_size, LargerGPT, zero_stage, world_size):
        inside, between = counter.counts["inside window"], counter.counts["between steps"]
        assert sum(inside.values()) == pytest.approx(per_parameter * counter.parameters, rel=0.01), inside
        # 4 of the parameter, 4 of its gradient and 8 of Adam's moments
        assert sum(between.values()) == pytest.approx(16 / world_size * counter.parameters, rel=0.01), between
        planned = counter.planned
        for kind in ("parameters", "gradients", "optimizer states"):
            assert inside[kind] == pytest.approx(planned[kind], rel=0.01), kind
        if zero_stage < 3:
            assert inside["gathered parameters"] == pytest.approx(planned["gathered parameters"], rel=0.01)
        else:  # the plan counts the largest block, which is there while it runs
            assert inside["gathered parameters"] <= planned["gathered parameters"]


@pytest.mark.parametrize("zero_stage", [1, 2, 3], ids=lambda stage: f"zero{stage}")
def test_frozen_parameters_cost_neither_gradients_nor_optimizer_states(zero_stage: int) -> None:
    module = LoRA()
    trainable = sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)
    assert trainable < 0.011 * sum(parameter.numel() for parameter in module.parameters())
    for counter in run_distributed(count_bytes, 2, LoRA, zero_stage, 2):
        inside, between = counter.counts["inside window"], counter.counts["between steps"]
        full, shard = 4 * trainable, 4 * trainable // 2  # both in fp32
        assert inside["gradients"] == (full if zero_stage == 1 else shard)
        assert between["gradients"] == shard
        assert between["optimizer states"] == 2 * shard
        assert counter.planned["gradients"] == inside["gradients"]
        assert counter.planned["optimizer states"] == between["optimizer states"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_setup_of_stage_3_never_holds_the_whole_model_on_the_device() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = [
        subprocess.Popen(
            [sys.executable, str(SETUP_SCRIPT)],
            env=os.environ
            | {
                "PYTHONPATH": str(REPOSITORY),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "WORLD_SIZE": "2",
                "NODE_RANK": str(rank),
                "LOCAL_RANK": "0",
            },
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=120)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0]
    for output in outputs:
        peak, whole = map(int, output.split()[-2:])
        # half of it as shards, and one block at a time with the copy in which it is sent
        assert whole / 2 <= peak < 0.75 * whole
