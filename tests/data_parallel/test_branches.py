"""Parts of a module that only some ranks, or no rank at all, use in a step."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.harness import WorkerError
from tests.harness.fitting import Fit, assert_equals_single_process, fit

WIDTH = 8


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(self.norm(x)).tanh()


class Branches(pl.LightningModule):
    """Each row goes through the branch that the batch names: ``(x [rows, WIDTH], branch [rows])``.

    With weight decay, a branch that nobody used must stay as it is, which a gradient of zeros would not leave it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.text, self.image, self.audio = (
            nn.Sequential(Residual(), Residual(), nn.Linear(WIDTH, 1)) for _ in range(3)
        )
        self.temperature = nn.Parameter(torch.tensor(1.5))  # used by one branch only, and without dims

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, branch = batch
        hidden = self.stem(x)
        errors = []
        for index, network in enumerate((self.text, self.image, self.audio)):
            chosen = branch == index
            if chosen.any():
                score = network(hidden[chosen]).squeeze(-1)
                if network is self.image:
                    score = score * self.temperature
                errors.append(F.softplus(-score))
        return torch.cat(errors).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5, weight_decay=0.1)


TEXT, IMAGE, AUDIO = range(3)
# By batch: the branch of rank 0's two rows and of rank 1's two rows.
CHOICES = [[TEXT, TEXT, IMAGE, IMAGE], [TEXT, IMAGE, IMAGE, TEXT], [IMAGE] * 4, [AUDIO, AUDIO, TEXT, TEXT]]


def batches(choices: list[list[int]] = CHOICES) -> list[tuple[Tensor, Tensor]]:
    x = torch.randn(len(choices), 4, WIDTH, generator=torch.Generator().manual_seed(2))
    return [(rows, torch.tensor(choice)) for rows, choice in zip(x, choices, strict=True)]


def same_branch_on_all_ranks() -> list[tuple[Tensor, Tensor]]:
    return batches([[TEXT] * 4, [IMAGE] * 4, [TEXT] * 4])


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("zero_stage", [0, 1, 2])
def test_branches_that_differ_between_ranks_count_as_zeros_where_absent(zero_stage: int, accumulate: int) -> None:
    run = Fit(Branches, batches, {"zero_stage": zero_stage}, trainer={"accumulate_grad_batches": accumulate})
    outcomes = assert_equals_single_process(run)
    used = {name.split(".")[0] for name in outcomes[1].gradients[0]}
    assert used == {"stem", "text", "image", "temperature"}, "a branch that no rank used has a gradient"


def test_branches_that_all_ranks_share_work_in_stage_3() -> None:
    assert_equals_single_process(Fit(Branches, same_branch_on_all_ranks, {"zero_stage": 3}))


def test_branches_that_differ_between_ranks_are_named_in_stage_3() -> None:
    with pytest.raises(WorkerError, match=r"rank 0 ran 'text\.0' and rank 1 ran 'image\.0'.*zero_stage=2"):
        fit(Fit(Branches, batches, {"zero_stage": 3}, timeout=40))
