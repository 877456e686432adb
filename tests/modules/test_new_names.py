"""Pruning by hand under tensor and pipeline parallelism: right before the first batch, refused by its line later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune
from torch.utils.data import DataLoader

from tests.harness import ADAMW_FP64, Training, make_trainer, run_distributed, train_and_assert_parity
from tests.models.gpt import GPT, batches

AXES = ("tensor_parallel_size", "pipeline_parallel_size")


def prune_some(layer: nn.Module) -> None:
    prune.l1_unstructured(layer, "weight", amount=0.3)


class Pruned(GPT):
    def setup(self, stage: str) -> None:
        prune_some(self.blocks[0].mlp[0])
        prune_some(self.blocks[1].mlp[2])


class PrunedLater(GPT):
    """Calls ``change`` with a layer in the second batch, or when the first epoch ends."""

    def __init__(self, change: Callable[[nn.Module], Any], in_batch: bool) -> None:
        super().__init__()
        self.change, self.in_batch = change, in_batch

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        if self.in_batch and batch_idx == 1:
            self.change(self.blocks[0].mlp[0])

    def on_train_epoch_end(self) -> None:
        self.head.weight = self.head.weight  # as it was
        nn.Linear(2, 2).weight = self.head.weight  # of a layer that is none of the module's
        self.change(self.blocks[0].mlp[0])


def refusals(axis: str) -> list[str]:
    found = []
    for change, in_batch in ((prune_some, True), (prune_some, False), (parametrizations.weight_norm, False)):
        trainer = make_trainer({axis: 2}, 2, max_epochs=1, use_distributed_sampler=False)
        module = PrunedLater(change, in_batch)
        with pytest.raises(RuntimeError, match="parameters cannot be exchanged") as refused:
            trainer.fit(module, DataLoader(batches(2, rows=4), batch_size=None))  # type: ignore[arg-type]
        assert trainer.global_step == (1 if in_batch else 2)
        found.append(str(refused.value))
        prune_some(nn.Linear(4, 4))  # nobody looks on any more
    return found


@pytest.mark.parametrize("axis", AXES)
def test_modules_in_parts_take_no_new_names(axis: str) -> None:
    for pruned, at_end, normalised in run_distributed(refusals, 2, axis):
        assert "'blocks.0.mlp.0' is given the parameter 'weight_orig'" in pruned
        assert "in prune_some: prune.l1_unstructured(layer" in pruned
        assert f"{axis}=2" in pruned
        assert "'weight_orig'" in at_end
        assert "'blocks.0.mlp.0' is given the parameter 'original0'" in normalised
        assert "on_train_epoch_end: self.change(" in normalised


@pytest.mark.parametrize("axis", AXES)
def test_pruning_before_the_first_batch_is_that_of_one_process(axis: str) -> None:
    train_and_assert_parity(
        Training(Pruned, batches, strategy={axis: 2}, world_size=2, precision="64-true"), ADAMW_FP64
    )
