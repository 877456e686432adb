"""Modules whose parts are used in other ways than by calling the whole: the numbers are those of one process."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.harness.fitting import ALL_STAGES, Fit, assert_equals_single_process, single_process
from tests.models.gpt import CONTEXT, VOCABULARY, Block

WIDTH = 8


class Backbone(nn.Module):
    """``forward`` is never called: the module around it uses ``encode``, ``embed`` and the layers themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block(WIDTH, 2) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def embed(self, tokens: Tensor) -> Tensor:
        return self.embedding(tokens) * self.scale

    def encode(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return x


class UsesPartsOfItself(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = Backbone()
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.queries = nn.Parameter(0.1 * torch.randn(CONTEXT, WIDTH))

    def loss(self, batch: Tensor) -> Tensor:
        tokens, labels = batch[:, :-1], batch[:, 1:].flatten()
        hidden = self.model.encode(tokens)
        loss = F.cross_entropy(self.head(hidden).flatten(0, 1), labels)
        # one layer alone, the bare parameter of the LightningModule, and weights used through functions
        single = self.model.layers[0](self.model.embed(tokens) + self.queries)
        scores = F.linear(single, self.model.embedding.weight)
        return loss + 0.5 * F.cross_entropy(scores.flatten(0, 1), labels) + 0.01 * self.head.weight.pow(2).sum()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    @torch.no_grad()
    def generate(self, tokens: Tensor, count: int) -> Tensor:
        """Greedy continuation of ``tokens [rows, length]`` by ``count`` tokens."""
        for _ in range(count):
            tokens = torch.cat([tokens, self.head(self.model.encode(tokens))[:, -1:].argmax(dim=-1)], dim=1)
        return tokens

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        continued = self.generate(batch[:, :4], count=3)
        self.log("val_tokens", continued.double().mean(), sync_dist=True, batch_size=1)
        self.log("val_loss", self.loss(batch), sync_dist=True, batch_size=1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5)


class UsesParametersDirectly(UsesPartsOfItself):
    """A penalty on all parameters, and weights of a block in functions whose gradients differ with the batch."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        penalty = sum(parameter.pow(2).sum() for parameter in self.parameters())
        norms = torch.stack([parameter.norm() for parameter in self.parameters()]).sum()
        inner = F.linear(self.model.embed(batch), self.model.layers[1].mlp[0].weight)
        return loss + 0.02 * penalty + 0.01 * norms + inner.pow(2).mean()


class SamplesBetweenSteps(pl.Callback):
    """Calls the module outside any step hook: its layers, its ``generate`` and a weight through a function."""

    def __init__(self) -> None:
        self.observation: list[Any] = []

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: UsesPartsOfItself, *_: Any) -> None:
        prompt = torch.arange(6).view(2, 3)
        tokens = pl_module.generate(prompt, count=3)
        with torch.no_grad():
            hidden = pl_module.model.layers[1](pl_module.model.embed(prompt))
        self.observation.append((tokens, hidden.clone()))


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(VOCABULARY, (4, CONTEXT + 1), generator=generator) for _ in range(3)]


@ALL_STAGES
def test_encode_layers_weights_and_generate_work_as_in_one_process(zero_stage: int) -> None:
    run = Fit(
        UsesPartsOfItself,
        batches,
        {"zero_stage": zero_stage},
        validation=batches,
        callbacks=(SamplesBetweenSteps,),
        trainer={"val_check_interval": 1},
    )
    outcomes = assert_equals_single_process(run)
    assert set(outcomes[0].logged) == {"train_loss", "val_tokens", "val_loss"}
    [expected] = single_process(run).observations
    for outcome in outcomes:
        [observed] = outcome.observations
        assert len(observed) == 3
        for (tokens, hidden), (expected_tokens, expected_hidden) in zip(observed, expected, strict=True):
            assert torch.equal(tokens, expected_tokens)
            torch.testing.assert_close(hidden, expected_hidden, rtol=1e-9, atol=1e-12)


@ALL_STAGES
def test_parameters_used_outside_their_modules_get_the_gradient_of_one_process(zero_stage: int) -> None:
    assert_equals_single_process(Fit(UsesParametersDirectly, batches, {"zero_stage": zero_stage}))
