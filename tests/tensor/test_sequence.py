"""With parts of the sequence between split layers, the numbers are those of the stock single-process Trainer."""

from __future__ import annotations

from collections import Counter
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode

from lightning_effi import TensorParallel, _compat
from lightning_effi.tensor.apply import AppliedPlan
from lightning_effi.tensor.decide import decide
from lightning_effi.tensor.plan import SequencePlan
from lightning_effi.tensor.trace import trace_block
from tests.harness import ADAMW_FP64, SGD_FP32, Bounds, Training, run_distributed, train_and_assert_parity
from tests.models import MODELS, ModelCase
from tests.models.gpt import Block
from tests.models.hugging_face import llama_model
from tests.tensor.architectures import ARCHITECTURES
from tests.tensor.test_parity import BOUNDS

EVERYTHING: dict[str, ModelCase] = {**MODELS, **ARCHITECTURES}


def sequence_parallel(size: int, zero_stage: int = 2) -> dict[str, Any]:
    return {
        "tensor_parallel_size": size,
        "tensor": TensorParallel(sequence_parallel=True),
        "zero_stage": zero_stage,
    }


def train_and_compare(
    model: str, size: int = 2, world_size: int = 2, bounds: Bounds = SGD_FP32, zero_stage: int = 2, **settings: Any
) -> None:
    case = EVERYTHING[model]
    if case.missing:
        pytest.skip(f"needs {', '.join(case.missing)}")
    strategy = sequence_parallel(size, zero_stage)
    train_and_assert_parity(
        Training(case.module, case.batches, strategy=strategy, world_size=world_size, **settings), bounds
    )


@pytest.mark.parametrize("model", EVERYTHING)
def test_two_ranks_equal_single_process(model: str) -> None:
    train_and_compare(model, bounds=BOUNDS.get(model, SGD_FP32))


@pytest.mark.parametrize("model", ["gpt-tied", "encoder", "llama", "gpt2", "llama-kv1-sdpa", "t5"])
def test_four_ranks_equal_single_process(model: str) -> None:
    train_and_compare(model, size=4, world_size=4)


@pytest.mark.parametrize(("model", "zero_stage"), [("gpt-tied", 0), ("llama", 1), ("nn-decoder", 2), ("llama", 3)])
def test_two_by_two_ranks_equal_single_process(model: str, zero_stage: int) -> None:
    train_and_compare(
        model, world_size=4, zero_stage=zero_stage, clip=0.1, accumulate=2, optimizer="adamw", precision="64-true",
        bounds=ADAMW_FP64,
    )  # fmt: skip


def checkpointing_llama(**settings: Any) -> pl.LightningModule:
    module = MODELS["llama"].module(**settings)
    module.model.gradient_checkpointing_enable({"use_reentrant": False})
    return module


@pytest.mark.parametrize(("world_size", "zero_stage"), [(2, 2), (4, 3)])
def test_recomputed_blocks_equal_single_process(world_size: int, zero_stage: int) -> None:
    if missing := MODELS["llama"].missing:
        pytest.skip(f"needs {missing}")
    strategy = sequence_parallel(2, zero_stage)
    train_and_assert_parity(
        Training(checkpointing_llama, MODELS["llama"].batches, strategy=strategy, world_size=world_size)
    )


# -- messages and memory ---------------------------------------------------------------------------------------------


def blocks_of(kind: str) -> tuple[nn.ModuleList, dict[str, Any]]:
    torch.manual_seed(0)
    if kind == "gpt":
        return nn.ModuleList(Block(32, 4) for _ in range(3)), {}
    model = llama_model().model
    table = model.rotary_emb(torch.zeros(2, 8, 32), torch.arange(8)[None])
    return model.layers[:3], {"position_embeddings": table, "attention_mask": None}


def run_blocks(kind: str, parallel: bool) -> tuple[Counter[str], Counter[str], int]:
    """Messages of the middle one of three blocks, forward and backward, and the bytes that all keep for backward."""
    blocks, kwargs = blocks_of(kind)
    x = torch.randn(2, 8, 32, requires_grad=True)
    groups, _ = decide(blocks[0], trace_block(blocks[0], (x,), kwargs), 2)
    found = [layer for group in groups for layer in group.layers]
    layers = [layer.below(str(i)) for i in range(3) for layer in found]
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    AppliedPlan(blocks, layers, mesh, [SequencePlan(str(i), 1, gathers=i == 2) for i in range(3)] if parallel else ())
    held: dict[int, int] = {}
    parameters = {local.untyped_storage().data_ptr() for local in map(_compat.local_tensor, blocks.parameters())}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            held[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        first = blocks[0](x, **kwargs)
        with CommDebugMode() as forward:
            second = blocks[1](first, **kwargs)
        last = blocks[2](second, **kwargs)
    pulled = torch.autograd.grad(last.sum(), second, retain_graph=True)
    with CommDebugMode() as backward:
        torch.autograd.backward(second, pulled, inputs=[first, *blocks[1].parameters()])
    return *(Counter({str(op): n for op, n in mode.get_comm_counts().items()}) for mode in (forward, backward)), sum(
        held.values()
    )


@pytest.mark.parametrize("kind", ["gpt", "llama"])
def test_a_block_assembles_twice_and_scatters_twice(kind: str) -> None:
    for forward, backward, _ in run_distributed(run_blocks, 2, kind, True):
        print(forward, backward)
