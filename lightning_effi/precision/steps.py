"""Optimizer steps under a loss scale: which are skipped, when the scale moves, and when a run has to end."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from lightning_effi.gradients.unscale import first_nonfinite, unscale_gradients
from lightning_effi.precision.scaling import PATIENCE, LossScaler

if TYPE_CHECKING:
    from collections.abc import Sequence


class AroundStep(Protocol):
    """What is entered right before an optimizer's update, when gradients were clipped, and left behind it."""

    def enter(self) -> None: ...

    def exit(self) -> None: ...


class ScaledSteps:
    """Takes or skips optimizer steps, alike on all ranks, and lets the scale follow.

    Args:
        scaler: the loss scale.
        device: where messages of the ranks are made.
        group: all ranks of the run; ``None``: there is only this one.

    Attributes:
        last_skipped: whether the last step was skipped.
    """

    def __init__(self, scaler: LossScaler, device: torch.device, group: Any | None) -> None:
        self.scaler = scaler
        self.device = device
        self.group = group
        self.last_skipped = False
        self._unscaled: int | None = None  # id of the optimizer whose gradients are unscaled at the moment
        self._overflows: list[bool] = []  # of the optimizers that stepped since the scale moved
        self._culprit: tuple[int, str] | None = None  # position and name of a parameter

    def take(
        self, optimizer: Optimizer, model: Any, after_backward: Callable[[], None], step: Callable[[], Any]
    ) -> Any:
        """Divide the gradients, run the hooks and clipping of ``after_backward``, and step where no rank overflowed.

        Fused optimizers, which could divide and skip on the device, are treated like all others: clipping needs the
        divided gradients, and the schedulers need to know on the host whether the step was taken.
        """
        found = unscale_gradients(optimizer, self.scaler.scale, self.device, self.group)
        if found.overflow and not self.scaler.can_shrink:
            self._culprit = first_nonfinite(model)  # before clipping by an infinite norm makes all gradients NaN
        self._unscaled = id(optimizer)
        try:
            after_backward()
            result = None if found.overflow else step()
        finally:
            self._unscaled = None
        if found.gradients:
            self._overflows.append(found.overflow)
        if found.overflow:
            self.scaler.skipped_steps += 1
        return result

    def factor_of(self, optimizer: Optimizer) -> float:
        """What an optimizer's gradients are multiplied with at the moment."""
        return 1.0 if self._unscaled == id(optimizer) else self.scaler.scale

    def move_scale(self, model: Any, in_pipeline: bool) -> float:
        """Let the scale follow what the optimizers found that stepped since the last call, together.

        Returns:
            the factor by which gradients that wait for a later step have to be multiplied.

        Raises:
            RuntimeError: on all ranks, where step after step overflows and the scale cannot shrink any further.
        """
        if not self._overflows:
            return 1.0
        scaler, before = self.scaler, self.scaler.scale
        self.last_skipped = any(self._overflows)
        scaler.update(self.last_skipped)
        self._overflows.clear()
        if scaler.is_stuck:
            self._raise_stuck(in_pipeline)
        for key, value in (("loss_scale", scaler.scale), ("skipped_steps", float(scaler.skipped_steps))):
            model.log(f"precision/{key}", value, on_step=True, on_epoch=False)
        return scaler.scale / before

    def _raise_stuck(self, in_pipeline: bool) -> NoReturn:
        """On all ranks alike, since all moved the scale alike; names the first gradient that is not finite."""
        culprits = [self._culprit]
        if self.group is not None:
            culprits = [None] * dist.get_world_size(self.group)
            dist.all_gather_object(culprits, self._culprit, group=self.group)
        # in a pipeline, where names are those of a stage, ranks are in the order of stages
        order = [((rank if in_pipeline else 0, c[0]), c[1], rank) for rank, c in enumerate(culprits) if c]
        _, name, rank = min(order, default=(None, "a parameter that is not the module's", 0))
        raise RuntimeError(
            f"loss scaling: {PATIENCE} optimizer steps in a row were skipped at the loss scale {self.scaler.scale:g},"
            f" which does not shrink any further. The first gradient that is not finite is that of '{name}' (rank"
            f" {rank}). 16-bit float cannot hold what is computed there, or the loss itself is not finite. Use"
            f" keep_fp32=['{name.rpartition('.')[0] or name}'], clamp_activations, a lower learning rate, or"
            " precision='bf16-mixed'; HealthCheck(checks=('nonfinite',)) names the module where it begins"
        )


def refuse_unscalable(optimizers: Sequence[Optimizer], precision: str) -> None:
    """Raise ``ValueError`` for optimizers whose gradients cannot be divided by the scale once, before their step."""
    if any(isinstance(optimizer, LBFGS) for optimizer in optimizers):
        raise ValueError(
            f"LBFGS computes gradients within its step, which precision={precision!r} cannot check for overflow before."
            " Use precision='bf16-mixed' or '32-true'"
        )
    held = [id(p) for optimizer in optimizers for p in _unique_parameters(optimizer)]
    if len(held) != len(set(held)):
        raise ValueError(
            f"precision={precision!r}: two optimizers hold the same parameter, whose gradient each of them would divide"
            " by the loss scale. Give it to one of them, or use precision='bf16-mixed'"
        )


def _unique_parameters(optimizer: Optimizer) -> list[Tensor]:
    return list({id(p): p for group in optimizer.param_groups for p in group["params"]}.values())
