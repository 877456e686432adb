"""A GAN with two optimizers that runs backward, accumulates, clips and steps by hand."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.harness.fitting import Fit, assert_equals_single_process, single_process

WIDTH = 8
CLIP = 0.05


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


class GAN(pl.LightningModule):
    """A batch is ``(noise [rows, WIDTH], real [rows, WIDTH])``; each optimizer steps after every second batch."""

    toggles = True

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(Residual(), Residual(), nn.Linear(WIDTH, WIDTH))
        self.discriminator = nn.Sequential(Residual(), Residual(), nn.Linear(WIDTH, 1))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        noise, real = batch
        generator, discriminator = self.optimizers()
        steps = batch_idx % 2 == 1

        if self.toggles:
            self.toggle_optimizer(generator)
        loss = F.softplus(-self.discriminator(self.generator(noise))).mean()
        self.finish("generator_loss", loss, generator, steps)
        if self.toggles:
            self.untoggle_optimizer(generator)
            self.toggle_optimizer(discriminator)
        else:
            discriminator.zero_grad()  # the generator's loss has reached the discriminator as well
        fake = self.generator(noise).detach()
        loss = F.softplus(-self.discriminator(real)).mean() + F.softplus(self.discriminator(fake)).mean()
        self.finish("discriminator_loss", loss, discriminator, steps)
        if self.toggles:
            self.untoggle_optimizer(discriminator)

    def finish(self, name: str, loss: Tensor, optimizer: torch.optim.Optimizer, steps: bool) -> None:
        self.manual_backward(loss / 2)
        self.log(name, loss, on_step=False, on_epoch=True, sync_dist=True, batch_size=1)
        if steps:
            self.clip_gradients(optimizer, gradient_clip_val=CLIP, gradient_clip_algorithm="norm")
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [
            torch.optim.SGD(self.generator.parameters(), lr=0.5),
            torch.optim.AdamW(self.discriminator.parameters(), lr=0.01),
        ]


class GANWithoutToggling(GAN):
    toggles = False


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    noise, real = torch.randn(2, 4, 4, WIDTH, generator=generator)
    return list(zip(noise, real + 1, strict=True))


@pytest.mark.parametrize(
    ("module", "zero_stage"),
    [
        (GAN, 0),
        (GAN, 2),
        (GANWithoutToggling, 3),
        *(pytest.param(GAN, stage, marks=pytest.mark.full) for stage in (1, 3)),
        *(pytest.param(GANWithoutToggling, stage, marks=pytest.mark.full) for stage in (0, 1, 2)),
    ],
)
def test_gan_with_two_optimizers_equals_single_process(module: type[GAN], zero_stage: int) -> None:
    run = Fit(module, batches, {"zero_stage": zero_stage})
    norms = [float(torch.cat([g.flatten() for g in step.values()]).norm()) for step in single_process(run).gradients]
    assert norms == pytest.approx([CLIP] * 4, rel=1e-4), "clipping by hand had no effect"
    outcomes = assert_equals_single_process(run)
    assert set(outcomes[0].logged) == {"generator_loss", "discriminator_loss"}
    assert outcomes[0].global_step == 4, "one for each step of each optimizer"
