"""What a module's own code does with parameters and ranks, where tensor parallelism splits layers."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from tests.harness import WorkerError, make_trainer, run_distributed
from tests.harness.fitting import Fit, Outcome, fit
from tests.harness.several_fits import assert_outcomes_equal, fit_several, single_processes
from tests.models.gpt import GPT, batches
from tests.sharded_tensors.test_user_code_on_shards import MODULES, NotesOnParameters

SPLIT = [kind for kind in MODULES if kind is not NotesOnParameters]


def runs() -> dict[str, Fit]:
    return {kind.__name__: Fit(kind, partial(batches, 3), {"tensor_parallel_size": 2}) for kind in SPLIT}


@cache
def outcomes() -> dict[str, list[Outcome]]:
    return fit_several(runs())


@pytest.mark.parametrize("name", [kind.__name__ for kind in SPLIT])
def test_user_code_has_the_effect_of_one_process(name: str) -> None:
    assert_outcomes_equal(outcomes()[name], single_processes(runs())[name])


def test_hooks_on_gradients_of_split_weights_are_refused_with_a_way_out() -> None:
    with pytest.raises(WorkerError, match=r"(?s)has a hook on its gradient.* on_after_backward"):
        fit(Fit(NotesOnParameters, partial(batches, 1), {"tensor_parallel_size": 2}))


class Gathers(GPT):
    """``seen``: what ``self.all_gather`` gives for the rank."""

    seen: Any = None

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.seen = self.all_gather(torch.tensor(self.trainer.strategy.context.rank))
        return super().training_step(batch, batch_idx)


def gather() -> list[int]:
    module = Gathers(blocks=2)
    trainer = make_trainer({"tensor_parallel_size": 2}, 4, max_steps=1, use_distributed_sampler=False)
    trainer.fit(module, DataLoader(batches(1), batch_size=None))  # type: ignore[arg-type]
    return module.seen.tolist()  # type: ignore[no-any-return]


def test_all_gather_is_over_the_ranks_with_other_rows() -> None:
    assert run_distributed(gather, 4) == [[0, 2], [1, 3], [0, 2], [1, 3]]
