"""Inside the module's hooks, words that count ranks count the different batches; everywhere else, processes."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

from lightning_effi.loop.hooks import STEPS
from lightning_effi.modules.shadows import Shadow
from tests.harness import BatchList, Training, WorkerError, make_trainer, run_distributed, run_isolated
from tests.harness.fitting import Fit, assert_equals_single_process
from tests.harness.parity import train_and_assert_parity
from tests.models.gpt import GPT, batches

TENSOR = {"tensor_parallel_size": 2}
STAGES = {"pipeline_parallel_size": 2, "microbatches": 2}
LAYOUTS = {"tp2": (2, TENSOR), "pp2": (2, STAGES)}
FOUR_RANKS = {"tp2-dp2": (4, TENSOR | {"zero_stage": 2}), "pp2-dp2": (4, STAGES), "tp2-pp2": (4, TENSOR | STAGES)}


class TokenMeans(GPT):
    """The loss of all tokens of all ranks, written in another way in each batch, and counted behind the blocks."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        scores = self(batch[:, :-1])
        total = F.cross_entropy(scores.flatten(0, 1), batch[:, 1:].flatten(), reduction="sum")
        count = torch.tensor(float(batch[:, 1:].numel()), dtype=total.dtype)
        if batch_idx == 0 or not dist.is_initialized():
            return total / self.all_gather(count).sum() * self.trainer.world_size
        if batch_idx == 1:
            dist.all_reduce(count)
            return total / count * dist.get_world_size()
        counts = [torch.empty_like(count) for _ in range(self.trainer.num_devices * self.trainer.num_nodes)]
        dist.all_gather(counts, count, group=dist.group.WORLD)
        return total / torch.stack(counts).sum() * len(counts)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for parameter in self.parameters():  # gradients are averages already, and stay so
            if parameter.grad is not None and dist.is_initialized() and not hasattr(parameter.grad, "placements"):
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()


def token_means(layout: tuple[int, Mapping[str, Any]]) -> Training:
    world_size, strategy = layout
    return Training(TokenMeans, partial(batches, rows=4), strategy=strategy, world_size=world_size, precision="64-true")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_that_count_ranks_are_those_of_one_process(layout: str) -> None:
    train_and_assert_parity(token_means(LAYOUTS[layout]))


@pytest.mark.full
@pytest.mark.parametrize("layout", FOUR_RANKS)
def test_losses_that_count_ranks_beside_data_parallelism(layout: str) -> None:
    train_and_assert_parity(token_means(FOUR_RANKS[layout]))


class InBatchNegatives(GPT):
    """Each row's embedding against those of all ranks."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.embedding(batch) + 0.0
        for block in self.blocks:
            x = block(x)
        z = F.normalize(x.mean(1), dim=-1)
        others = self.all_gather(z, sync_grads=True).reshape(-1, z.shape[-1])
        mine = torch.arange(len(z)) + len(z) * (dist.get_rank() if dist.is_initialized() else 0)
        return F.cross_entropy(5 * z @ others.T, mine)


@pytest.mark.parametrize(
    ("world_size", "strategy"),
    [(2, {"zero_stage": 2}), (2, TENSOR), pytest.param(4, TENSOR | {"zero_stage": 2}, marks=pytest.mark.full)],
)
def test_gradients_flow_through_what_ranks_gather(world_size: int, strategy: dict[str, Any]) -> None:
    assert_equals_single_process(Fit(InBatchNegatives, partial(trimmed, 2), strategy, world_size))


def test_gradients_flow_through_what_a_stage_gathers() -> None:
    strategy = {**STAGES, "microbatches": 1}
    train_and_assert_parity(Training(InBatchNegatives, trimmed, strategy=strategy, world_size=2, precision="64-true"))


def trimmed(count: int) -> list[Tensor]:
    return [batch[:, :-1] for batch in batches(count, rows=4)]


class OwnSampler(GPT):
    """Shares out its data as scripts for DDP do."""

    def setup(self, stage: str) -> None:
        self.share = (self.trainer.global_rank, self.trainer.world_size)

    def train_dataloader(self) -> DataLoader[Any]:
        data = BatchList(batches(4))
        sampler = DistributedSampler(data, *reversed(self.share), shuffle=False)  # type: ignore[arg-type]
        if dist.is_initialized():
            sampler = DistributedSampler(data, shuffle=False)
        return DataLoader(data, batch_size=None, sampler=sampler)

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        self.seen = [*getattr(self, "seen", []), batch]

    def on_train_epoch_end(self) -> None:
        rows = torch.tensor(float(sum(len(batch) for batch in self.seen)))
        if dist.is_initialized():
            dist.all_reduce(rows)
        self.rows = float(rows)

    def on_train_end(self) -> None:
        self.at_the_end = (self.trainer.world_size, self.trainer.global_rank)
        if dist.is_initialized():
            assert self.at_the_end == (dist.get_world_size(), dist.get_rank())


def share_out(strategy: Any, world_size: int, *, fails: bool = False) -> dict[str, Any]:
    module = OwnSampler()
    trainer = make_trainer(strategy, world_size, max_epochs=1, use_distributed_sampler=False)
    if fails:
        module.on_before_zero_grad = lambda optimizer: 1 / 0
        with pytest.raises(ZeroDivisionError):
            trainer.fit(module)
    else:
        trainer.fit(module)
    hooks = [name for name, value in vars(module).items() if isinstance(value, Shadow)]
    group = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    return {
        "share": module.share,
        "seen": module.seen,
        "rows": vars(module).get("rows"),
        "hooks": hooks,
        "group": group,
        "end": vars(module).get("at_the_end"),
    }


@pytest.mark.parametrize("layout", LAYOUTS)
def test_data_that_the_module_shares_out_is_that_of_one_process(layout: str) -> None:
    expected = run_isolated(share_out, None, 1)
    for rank, found in enumerate(run_distributed(share_out, 2, LAYOUTS[layout][1], 2)):
        assert found["share"] == (0, 1)
        assert found["rows"] == expected["rows"] == 8.0
        assert torch.equal(torch.stack(found["seen"]), torch.stack(expected["seen"]))
        assert found["end"] == found["group"] == (2, rank), "processes again, when the loop has ended"
        assert found["hooks"] == []


def test_words_mean_processes_again_after_a_failed_run() -> None:
    for rank, found in enumerate(run_distributed(partial(share_out, fails=True), 2, STAGES, 2)):
        assert found["group"] == (2, rank)
        assert found["hooks"] == []


class ByProcess(GPT):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self.global_rank == 0:  # compared, as in printing on one rank
            assert f"rank {self.global_rank}" == "rank 0"
        own = self.trainer.global_rank
        return super().training_step(batch[own % self.trainer.world_size :], batch_idx)


class CountsAndPrints(ByProcess):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self.global_rank == 0 and self.trainer.is_global_zero:
            assert f"rank {self.global_rank}" == "rank 0"
        return GPT.training_step(self, batch, batch_idx) * self.trainer.world_size


def train(module: Any, strategy: dict[str, Any]) -> None:
    make_trainer(strategy, 2, max_steps=1).fit(module(), DataLoader(BatchList(batches(1, rows=4)), batch_size=None))


def test_a_process_taken_for_a_place_among_batches_is_refused_by_its_line() -> None:
    run_distributed(train, 2, CountsAndPrints, STAGES)
    with pytest.raises(
        WorkerError, match=r"training_step uses trainer.global_rank \(.*test_ranks.py:\d+: own = "
    ) as error:
        run_distributed(train, 2, ByProcess, STAGES)
    assert "together with trainer.world_size" in str(error.value)
    assert "Use trainer.strategy.data_parallel_rank" in str(error.value)


class Throughput(pl.Callback):
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self.observation = [trainer.world_size]

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.observation += [trainer.world_size, trainer.global_rank]

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.observation += [trainer.world_size]


def observe(strategy: dict[str, Any]) -> Any:
    callback, module = Throughput(), GPT()
    trainer = make_trainer(strategy, 2, max_steps=1, callbacks=[callback])
    trainer.fit(module, DataLoader(BatchList(batches(1, rows=4)), batch_size=None))
    return callback.observation


def test_callbacks_count_batches_and_name_their_files_by_process() -> None:
    assert run_distributed(observe, 2, STAGES) == [[1, 1, 0, 2], [1, 1, 1, 2]]


def test_steps_are_told_apart_by_name() -> None:
    assert all(callable(getattr(pl.LightningModule, name)) for name in STEPS)
