"""What all example modules share: an optimizer by name, a schedule that moves every step, a logged loss."""

from __future__ import annotations

from typing import Any, Literal

import lightning.pytorch as pl
import torch
from torch import Tensor

OptimizerName = Literal["sgd", "adamw"]

# SGD takes steps so long that fp32 rounding of the parameters themselves stays below 1e-5 of a step. AdamW takes short
# ones: where the true gradient is zero (the bias of attention keys) it turns rounding noise into an update.
DEFAULT_LEARNING_RATE: dict[str, float] = {"sgd": 0.5, "adamw": 1e-3}


class ExampleModule(pl.LightningModule):
    """An ordinary LightningModule. Subclasses build their layers and implement :meth:`loss`."""

    def __init__(self, optimizer: OptimizerName = "sgd", learning_rate: float | None = None) -> None:
        super().__init__()
        self.optimizer_name = optimizer
        self.learning_rate = DEFAULT_LEARNING_RATE[optimizer] if learning_rate is None else learning_rate

    def loss(self, batch: Any) -> Tensor:
        """Scalar mean loss of a batch."""
        raise NotImplementedError

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True, sync_dist=True, batch_size=1)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True, batch_size=1)

    def configure_optimizers(self) -> dict[str, Any]:
        trainable = [parameter for parameter in self.parameters() if parameter.requires_grad]
        optimizer: torch.optim.Optimizer
        if self.optimizer_name == "sgd":
            optimizer = torch.optim.SGD(trainable, lr=self.learning_rate)
        else:
            optimizer = torch.optim.AdamW(trainable, lr=self.learning_rate, weight_decay=0.1)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1.0 + 0.1 * step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
