"""Tensor parallelism through the whole life of a run: data, evaluation, checkpoints, what is left afterwards."""

from __future__ import annotations

import copy
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torchmetrics
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_effi import TensorParallel
from lightning_effi.compat import dtensor as dtensor_compat
from tests.harness import (
    BatchList,
    Training,
    WorkerError,
    full_tensor,
    make_trainer,
    run_distributed,
    run_isolated,
    train_and_assert_parity,
)
from tests.models import MODELS
from tests.models.gpt import GPT, batches
from tests.tensor_parallel.architectures import ARCHITECTURES

TP2 = {"tensor_parallel_size": 2}


def gpt(optimizer: str = "adamw", **settings: Any) -> GPT:
    pl.seed_everything(5, verbose=False)
    return GPT(optimizer=optimizer, **settings)


def loader(count: int = 4) -> DataLoader[Any]:
    return DataLoader(BatchList(batches(count)), batch_size=None)


def plain_state(module: nn.Module) -> dict[str, Tensor]:
    return {name: full_tensor(value) for name, value in module.state_dict().items()}


# -- afterwards ------------------------------------------------------------------------------------------------------


def train_twice_then_call() -> Any:
    module = gpt()
    trainer = make_trainer(TP2, 2, max_steps=2)
    trainer.fit(module, loader())
    plan = str(trainer.strategy.plan)
    assert all(type(p) is nn.Parameter for p in module.parameters())
    assert not any(m._forward_pre_hooks for m in module.modules())
    assert torch.backends.mha.get_fastpath_enabled()
    make_trainer(TP2, 2, max_steps=1).fit(module, loader())
    return plan, module(batches(1)[0][:, :-1]), plain_state(module)


def test_module_is_an_ordinary_one_again() -> None:
    (plan, output, state), (_, other, _) = run_distributed(train_twice_then_call, 2)
    assert "blocks.*.attention.qkv: column_packed:3" in plan
    assert "stays whole: everything outside the blocks" in plan
    assert torch.equal(output, other)
    module = gpt()
    module.load_state_dict(state)
    torch.testing.assert_close(module(batches(1)[0][:, :-1]), output)


# -- checkpoints -----------------------------------------------------------------------------------------------------


def fit(strategy: Any, world_size: int, directory: str, steps: int, resume: bool, save: bool) -> dict[str, Tensor]:
    module = gpt().double()  # stock Lightning loads a checkpoint before it converts the module
    trainer = make_trainer(strategy, world_size, max_steps=steps, gradient_clip_val=0.1, precision="64-true")
    trainer.fit(module, loader(2), ckpt_path=f"{directory}/saved.ckpt" if resume else None)
    return plain_state(module)


def fit_and_save(strategy: Any, world_size: int, directory: str) -> dict[str, Tensor]:
    module = gpt()
    saver = pl.callbacks.ModelCheckpoint(directory, filename="saved", every_n_train_steps=2, save_top_k=-1)
    trainer = make_trainer(
        strategy, world_size, callbacks=[saver], max_steps=2, gradient_clip_val=0.1, precision="64-true",
        enable_checkpointing=True,
    )  # fmt: skip
    trainer.fit(module, loader(2))
    return plain_state(module)


LAYOUTS: dict[str, tuple[Any, int]] = {
    "plain": (None, 0),
    "tp2": (TP2, 2),
    "tp4": ({"tensor_parallel_size": 4}, 4),
    "zero3-tp2": ({"tensor_parallel_size": 2, "zero_stage": 3}, 4),
    "zero2": ({"zero_stage": 2}, 2),
}


def launch(fn: Any, layout: str, *args: Any, **strategy: Any) -> Any:
    chosen, world_size = LAYOUTS[layout]
    if chosen is None:
        return run_isolated(fn, None, 1, *args)
    return run_distributed(fn, world_size, {**chosen, **strategy}, world_size, *args)[0]


@pytest.mark.parametrize(
    ("saved", "loaded", "checkpoints"),
    [
        ("tp2", "tp2", "sharded"),
        ("zero3-tp2", "tp2", "full"),
        pytest.param("zero2", "tp2", "sharded", marks=pytest.mark.full),
        pytest.param("tp2", "zero3-tp2", "sharded", marks=pytest.mark.full),
        pytest.param("tp2", "tp4", "full", marks=pytest.mark.full),
        pytest.param("tp2", "tp2", "full", marks=pytest.mark.full),
        pytest.param("zero3-tp2", "tp2", "sharded", marks=pytest.mark.full),
        pytest.param("tp2", "zero3-tp2", "full", marks=pytest.mark.full),
        pytest.param("tp2", "tp4", "sharded", marks=pytest.mark.full),
        pytest.param("zero2", "tp2", "full", marks=pytest.mark.full),
    ],
)
def test_any_layout_resumes_from_any_other(saved: str, loaded: str, checkpoints: str, tmp_path: Path) -> None:
    state = launch(fit_and_save, saved, str(tmp_path), checkpoints=checkpoints)
    resumed = launch(fit, loaded, str(tmp_path), 2, True, False, checkpoints=checkpoints)
    for name, value in state.items():
        assert torch.equal(resumed[name], value), name


@pytest.mark.parametrize("checkpoints", [pytest.param("full", marks=pytest.mark.full), "sharded"])
def test_resumed_equals_uninterrupted(checkpoints: str, tmp_path: Path) -> None:
    launch(fit_and_save, "tp2", str(tmp_path), checkpoints=checkpoints)
    resumed = launch(fit, "tp2", str(tmp_path), 4, True, False, checkpoints=checkpoints)
    straight = launch(fit, "tp2", str(tmp_path), 4, False, False, checkpoints=checkpoints)
    for name, value in straight.items():
        assert torch.equal(resumed[name], value), name


def test_full_checkpoint_is_what_a_single_process_saves_and_resumes_there(tmp_path: Path) -> None:
    launch(fit_and_save, "tp2", str(tmp_path))
    saved = torch.load(tmp_path / "saved.ckpt", weights_only=True)
    shapes = {name: tuple(value.shape) for name, value in gpt().state_dict().items()}
    assert {name: tuple(value.shape) for name, value in saved["state_dict"].items()} == shapes
    resumed = launch(fit, "plain", str(tmp_path), 4, True, False)
    straight = launch(fit, "plain", str(tmp_path), 4, False, False)
    for name, value in straight.items():
        torch.testing.assert_close(resumed[name], value, rtol=0, atol=1e-9)


# -- evaluation ------------------------------------------------------------------------------------------------------


# torchmetrics' states and Lightning's means over an epoch are fp32, whatever the module computes in.
FP32_METRICS = 1e-6


class Evaluated(GPT):
    """Metrics of every kind, and methods of inner modules called directly."""

    def __init__(self) -> None:
        super().__init__(optimizer="sgd")
        self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=17)
        self.total = torchmetrics.SumMetric()
        self.mean = torchmetrics.MeanMetric()

    def encode(self, tokens: Tensor) -> Tensor:
        x = F.embedding(tokens, self.embedding.weight) + self.positions[: tokens.shape[1]]
        x = self.blocks[0](x)
        for block in self.blocks[1:]:
            x = block.mlp(block.norm2(block.attention(x)))
        return x

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.loss(batch) + self.encode(batch[:, :-1]).square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        logits = self(batch[:, :-1])
        self.accuracy(logits.flatten(0, 1), batch[:, 1:].flatten())
        self.total(float(len(batch)))
        self.mean(logits.square().mean(), weight=len(batch))
        self.log("accuracy", self.accuracy)
        self.log("mean", self.mean)
        self.log("total", self.total)
        self.log("loss", self.loss(batch), sync_dist=True, batch_size=len(batch))
        self.log("rows", float(len(batch)), sync_dist=True, reduce_fx="sum", batch_size=len(batch))

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(batch[:, :-1]).argmax(-1)


def evaluate(strategy: Any, world_size: int) -> Any:
    pl.seed_everything(5, verbose=False)
    module = Evaluated()
    rows = torch.cat(batches(7, rows=3))
    data = DataLoader(rows, batch_size=4)
    exact: dict[str, Any] = {"precision": "64-true"}
    trainer = make_trainer(strategy, world_size, max_steps=3, num_sanity_val_steps=1, **exact)
    trainer.fit(module, DataLoader(rows, batch_size=4, shuffle=True), data)
    fitted = {key: float(value) for key, value in trainer.callback_metrics.items()}
    validated = make_trainer(strategy, world_size, **exact).validate(module, data, verbose=False)
    predicted = make_trainer(strategy, world_size, **exact).predict(module, data)
    return fitted, validated, torch.cat(predicted)


def test_evaluation_counts_every_row_once_and_shuffling_loaders_keep_one_order() -> None:
    fitted, validated, predicted = run_isolated(evaluate, None, 1)
    for ours in run_distributed(evaluate, 2, TP2, 2):
        assert ours[0] == pytest.approx(fitted, rel=FP32_METRICS)
        assert ours[1][0] == pytest.approx(validated[0], rel=FP32_METRICS)
        assert ours[1][0]["total"] == ours[1][0]["rows"] == 21.0
        assert torch.equal(ours[2], predicted)


def evaluate_over_replicas() -> Any:
    data = DataLoader(torch.cat(batches(7, rows=3)), batch_size=4)
    trainer = make_trainer(TP2, 4)
    return trainer.validate(Evaluated(), data, verbose=False)[0]


def test_data_parallel_evaluation_counts_the_rows_that_padding_repeats_and_no_more() -> None:
    first, *others = run_distributed(evaluate_over_replicas, 4)
    assert first["total"] == first["rows"] == 22.0  # the sampler gives both ranks eleven of 21 rows
    assert all(other == first for other in others)


# -- randomness and data ---------------------------------------------------------------------------------------------


class Dropping(GPT):
    """Half of everything is dropped: in the residual stream, inside the MLPs, among attention weights."""

    def __init__(self) -> None:
        super().__init__(optimizer="sgd")
        self.residual = nn.Dropout(0.5)
        for block in self.blocks:
            block.mlp.insert(2, nn.Dropout(0.5))
            block.attention.dropout = nn.Dropout(0.5)
            block.attention.forward = partial(attend_with_dropout, block.attention)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.residual(self.embedding(tokens) + self.positions[: tokens.shape[1]])
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def attend_with_dropout(self: nn.Module, x: Tensor) -> Tensor:
    rows, length, width = x.shape
    q, k, v = (part.view(rows, length, self.heads, -1).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
    weights = self.dropout((q @ k.mT).softmax(dim=-1))
    return self.proj((weights @ v).transpose(1, 2).reshape(rows, length, width))


class Masks(pl.Callback):
    """What was kept in this rank's part, where anything was there to be kept; of the last step."""

    def __init__(self) -> None:
        self.kept: dict[str, Tensor] = {}

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        for name, module in pl_module.named_modules():
            if isinstance(module, nn.Dropout):
                module.register_forward_hook(partial(self._note, name))

    def _note(self, name: str, _module: nn.Module, args: Any, output: Tensor) -> None:
        before, after = (t.detach().as_subclass(Tensor) for t in (args[0], output))
        self.kept[name] = after[before != 0] != 0


class Parameters(pl.Callback):
    """What this rank holds of the parameters that tensor parallelism has not split, after the last step."""

    def __init__(self) -> None:
        self.last: dict[str, Tensor] = {}

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        for name, parameter in pl_module.named_parameters():
            mesh = getattr(parameter, "device_mesh", None)
            if mesh is None or "tp" not in mesh.mesh_dim_names:
                self.last[name] = (parameter if mesh is None else parameter.to_local()).detach().clone()


def train_with_dropout(world_size: int) -> Any:
    pl.seed_everything(5 + torch.distributed.get_rank(), verbose=False)  # ranks that were not seeded alike
    module, masks, parameters = Dropping(), Masks(), Parameters()
    trainer = make_trainer(TP2, world_size, callbacks=[masks, parameters], max_steps=5)
    same = [batches(1)[0]] * 20
    trainer.fit(module, DataLoader(BatchList(same), batch_size=None))
    return masks.kept, parameters.last


def test_replicas_drop_alike_and_parts_and_data_parallel_ranks_differently() -> None:
    results = run_distributed(train_with_dropout, 4, 4)
    (first, p0), (second, p1), (other, p2), (last, p3) = results
    assert torch.equal(first["residual"], second["residual"])
    assert torch.equal(other["residual"], last["residual"])
    assert not torch.equal(first["residual"], other["residual"])
    inside = [name for name in first if name != "residual"]
    assert {name.rpartition(".")[2] for name in inside} == {"2", "dropout"}
    for name in inside:
        ranks = [kept[name] for kept in (first, second, other, last)]
        assert not any(torch.equal(a, b) for a, b in combinations(ranks, 2)), name
    rates = [torch.cat([kept[name] for kept in (first, second, other, last) for name in inside]).float().mean()]
    rates.append(torch.cat([first["residual"], other["residual"]]).float().mean())
    assert all(abs(float(rate) - 0.5) < 0.03 for rate in rates), rates
    assert "blocks.0.norm1.weight" in p0
    assert all(torch.equal(p1[name], value) for name, value in p0.items())
    assert all(torch.equal(p3[name], value) for name, value in p2.items())


def train_on_different_batches() -> None:
    module = gpt("sgd")
    other = batches(4, seed=torch.distributed.get_rank())
    make_trainer(TP2, 2, max_steps=1).fit(module, DataLoader(BatchList(other), batch_size=None))


def test_different_batches_in_a_group_are_refused() -> None:
    with pytest.raises(WorkerError, match="were given different batches in step 1"):
        run_distributed(train_on_different_batches, 2)


# -- bad input -------------------------------------------------------------------------------------------------------


class NothingToSplit(GPT):
    def __init__(self) -> None:
        super().__init__(optimizer="sgd")
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16)) for _ in range(2))


def train(kind: str, **strategy: Any) -> None:
    pl.seed_everything(5, verbose=False)
    if kind == "nothing":
        module: pl.LightningModule = NothingToSplit()
    elif kind == "lbfgs":
        module = GPT()
        module.configure_optimizers = lambda: torch.optim.LBFGS(module.parameters())  # type: ignore[method-assign]
    else:
        module = {**MODELS, **ARCHITECTURES}[kind].module()
    make_trainer({**TP2, **strategy}, 2, max_steps=1).fit(module, loader())


@pytest.mark.parametrize(
    ("kind", "plan", "message"),
    [
        ("nothing", "auto", "finds nothing to split in NothingToSplit.*Use tensor_parallel_size=1"),
        ("lbfgs", "auto", "tensor_parallel_size=2 shards the parameters, and LBFGS needs"),
        ("gpt-tied", {"*.attention.qkv": "column_packed:2"}, "does not compute what 'blocks.0' does"),
        (
            "gpt-tied",
            {"*.attn.qkv": "column"},
            "no linear layer .* called '\\*.attn.qkv'. There are blocks.\\*.attention",
        ),
    ],
)
def test_bad_input_is_refused_before_training(kind: str, plan: Any, message: str) -> None:
    with pytest.raises(WorkerError, match=message):
        run_distributed(_train_with_plan, 2, kind, plan)


def _train_with_plan(kind: str, plan: Any) -> None:
    from lightning_effi import TensorParallel

    train(kind, tensor=TensorParallel(plan=plan))


class Held(pl.Callback):
    """Observes the shapes of the weights that this rank holds of the first block."""

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        weights = {name: pl_module.get_submodule(f"blocks.0.{name}").weight for name in USER_PLAN}
        self.observation = {name: tuple(dtensor_compat.local_tensor(w).shape) for name, w in weights.items()}


USER_PLAN = {"attention.qkv": "column_packed:16,16,16", "attention.proj": "replicate", "mlp.0": "column_gather"}


def test_user_plan_is_carried_out() -> None:
    plan = {f"*.{name}": style for name, style in USER_PLAN.items()}
    strategy = {**TP2, "tensor": TensorParallel(plan=plan)}
    record = train_and_assert_parity(Training(GPT, batches, strategy=strategy, world_size=2, callbacks=(Held,)))
    for [held] in record.observations:
        assert held == {"attention.qkv": (24, 16), "attention.proj": (16, 16), "mlp.0": (32, 16)}


# -- habits of users' modules ----------------------------------------------------------------------------------------


class ByHand(GPT):
    """Manual optimization of two optimizers in turn, and a moving average that is a copy of the module.

    One list of blocks is not used in training.
    """

    def __init__(self) -> None:
        super().__init__(optimizer="sgd", tied=False)
        self.automatic_optimization = False
        self.unused = nn.ModuleList([nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))])
        self.average: list[nn.Module] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        for optimizer in self.optimizers():
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            self.clip_gradients(optimizer, 0.1, "norm")
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        inner = {id(parameter) for parameter in self.blocks.parameters()}
        others = [parameter for parameter in self.parameters() if id(parameter) not in inner]
        return [torch.optim.SGD(parameters, lr=0.5) for parameters in (self.blocks.parameters(), others)]

    def on_train_batch_end(self, *_: Any) -> None:
        if not self.average:
            self.average.append(copy.deepcopy(self.blocks))
        with torch.no_grad():
            for mean, current in zip(self.average[0].parameters(), self.blocks.parameters(), strict=True):
                mean.lerp_(current, 0.5)


def train_by_hand(strategy: Any, world_size: int) -> Any:
    pl.seed_everything(5, verbose=False)
    module = ByHand()
    make_trainer(strategy, world_size, max_steps=3, precision="64-true").fit(module, loader())
    hidden = torch.ones(1, 4, 16, dtype=torch.float64)
    for block in module.average[0]:
        hidden = block(hidden)
    return plain_state(module), hidden.detach(), plain_state(module.average[0])


def test_manual_optimization_and_a_copied_average_equal_single_process() -> None:
    state, hidden, average = run_isolated(train_by_hand, None, 1)
    for ours in run_distributed(train_by_hand, 2, TP2, 2):
        for name, value in state.items():
            torch.testing.assert_close(ours[0][name], value, rtol=0, atol=1e-9)
        for name, value in average.items():
            torch.testing.assert_close(ours[2][name], value, rtol=0, atol=1e-9)
        torch.testing.assert_close(ours[1], hidden, rtol=0, atol=1e-9)


def checkpointing_llama(**settings: Any) -> pl.LightningModule:
    module = MODELS["llama"].module(**settings)
    module.model.gradient_checkpointing_enable({"use_reentrant": False})
    return module


def test_recomputed_blocks_equal_single_process() -> None:
    if missing := MODELS["llama"].missing:
        pytest.skip(f"needs {missing}")
    train_and_assert_parity(Training(checkpointing_llama, MODELS["llama"].batches, strategy=TP2, world_size=2))


class Rehearsed(GPT):
    """``until_first``: how often ``training_step`` had run when the first batch was trained on."""

    until_first = 0
    calls = 0  # of the class: what a rehearsed step counts on the module is put back

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        Rehearsed.calls += 1
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None:
        self.until_first = self.until_first or Rehearsed.calls


def rehearsals() -> list[int]:
    counts = []
    for validated in (False, True):
        module, Rehearsed.calls = Rehearsed(blocks=2), 0
        data = DataLoader(batches(2), batch_size=None)  # type: ignore[arg-type]
        trainer = make_trainer({"tensor_parallel_size": 2}, 2, max_epochs=1, use_distributed_sampler=False)
        trainer.fit(module, data, data if validated else None)
        counts.append(module.until_first)
    return counts


def test_first_step_runs_after_one_observed_and_one_compared() -> None:
    assert run_distributed(rehearsals, 2) == [[3, 3]] * 2


class Validated(GPT):
    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("validated", self.loss(batch))


def validate_between_fits(strategy: dict[str, Any], size: int) -> list[tuple[float, float]]:
    module, data = Validated(), DataLoader(batches(1), batch_size=None)  # type: ignore[arg-type]
    trainer, found = make_trainer(strategy, size, max_epochs=1, use_distributed_sampler=False), []
    for epochs in (1, 2):
        trainer.fit_loop.max_epochs = epochs
        trainer.fit(module, data)
        logged = trainer.validate(module, data, verbose=False)[0]["validated"]
        with torch.no_grad():
            found.append((logged, module.loss(batches(1)[0]).item()))
    return found


@pytest.mark.parametrize(("size", "zero_stage"), [(2, 0), pytest.param(4, 3, marks=pytest.mark.full)])
def test_validating_between_two_fits(size: int, zero_stage: int) -> None:
    for first, second in run_distributed(validate_between_fits, size, TP2 | {"zero_stage": zero_stage}, size):
        assert first[0] == pytest.approx(first[1], rel=1e-5)
        assert second[0] == pytest.approx(second[1], rel=1e-5)
        assert second[0] < first[0]
