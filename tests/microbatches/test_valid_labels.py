"""``weight="valid_labels"``: one mean over the valid labels of all ranks and batches of an update."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pkgutil import resolve_name
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DistributedSampler

from tests.harness import BatchList, Training, WorkerError, assert_parity, run, run_reference
from tests.models import MODELS
from tests.models.gpt import GPT
from tests.models.gpt import batches as token_batches

STEPS, SEED = 3, 7


def uneven_batches(model: str, rows: int, count: int) -> list[Any]:
    """Batches whose numbers of valid labels differ by a factor of several."""
    made = resolve_name(MODELS[model].data)(count, rows=rows)
    for index, batch in enumerate(made):
        labels = batch["labels"] if isinstance(batch, dict) else batch[2]
        if index % 3 == 1:
            labels[1:] = -100
        if index % 3 == 2:
            labels[:, 5:] = -100
    return made


def joined(make: Callable[[int], list[Any]], size: int, shuffled: bool, count: int) -> list[Any]:
    """``count`` batches of all that makes up an update, in the order in which the ranks take it."""
    parts = make(count * size)
    order = list(range(len(parts)))
    if shuffled:  # as Lightning's sampler for several ranks draws them
        order = list(DistributedSampler(BatchList(parts), num_replicas=1, rank=0, shuffle=True, seed=SEED))
    groups = [[parts[i] for i in order[start : start + size]] for start in range(0, len(order), size)]
    return [_join(group) for group in groups]


def _join(group: list[Any]) -> Any:
    if isinstance(group[0], Tensor):
        return torch.cat(group)
    if isinstance(group[0], dict):
        return {key: torch.cat([batch[key] for batch in group]) for key in group[0]}
    return tuple(torch.cat(parts) for parts in zip(*group, strict=True))


CASES = {
    "llama-zero2": ("llama", 2, 2, {"zero_stage": 2, "microbatches": 2}),
    "encoder-zero0-uncut": ("encoder", 2, 2, {"zero_stage": 0, "microbatches": 1}),
    "llama-window": ("llama", 1, 3, {"microbatches": 3}),
    "bert-pp2-zero1": ("bert", 4, 2, {"zero_stage": 1, "pipeline_parallel_size": 2, "microbatches": 2}),
}


@pytest.mark.parametrize("case", CASES)
def test_update_is_that_of_all_labels_together(case: str) -> None:
    model, world_size, accumulate, strategy = CASES[case]
    if MODELS[model].missing:
        pytest.skip(f"needs {', '.join(MODELS[model].missing)}")
    weighted = {**strategy, "microbatches": {"count": strategy["microbatches"], "weight": "valid_labels"}}
    weighted["microbatches"]["labels_key"] = "2" if model == "encoder" else "labels"
    make = partial(uneven_batches, model, 4)
    training = Training(
        MODELS[model].module, make, strategy=weighted, world_size=world_size, accumulate=accumulate, clip=0.1,
        steps=STEPS, seed=SEED,
    )  # fmt: skip
    together = accumulate * training.data_parallel_size
    data = partial(joined, make, together, training.data_parallel_size > 1)
    whole = run_reference(replace(training, data_factory=data, strategy=None, world_size=1, accumulate=1))
    record = run(training)
    assert_parity(replace(record, losses=[], logged={}), replace(whole, losses=[], logged={}))


def test_labels_that_are_not_there_are_named() -> None:
    training = Training(
        GPT, token_batches, strategy={"microbatches": {"count": 1, "weight": "valid_labels"}}, accumulate=2
    )
    with pytest.raises(WorkerError, match="looks for labels_key='labels' in the batch"):
        run(training)
