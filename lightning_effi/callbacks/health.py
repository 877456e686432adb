"""Checks that run beside training and end it, or warn, with a name."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, get_args

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from typing_extensions import override

from lightning_effi.compat import lightning as lightning_compat
from lightning_effi.config import check_positive
from lightning_effi.gradients.clipping import gradient_norm
from lightning_effi.gradients.unscale import first_nonfinite
from lightning_effi.mesh import MeshStrategy
from lightning_effi.verify.nonfinite import Finding, NonfiniteWatch

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer


Check = Literal["gradients", "parameters", "seeds", "batches", "nonfinite"]
_BUILT = ("nonfinite",)
_LISTED = 3


class HealthCheck(pl.Callback):
    """Names the first module that makes values infinite or NaN, and logs the norm of the whole gradient.

    ``nonfinite`` looks at what goes into and comes out of every module, and at the gradients of both. Where a module
    makes values that are not finite from finite ones, the run ends with its name, on all ranks, before the optimizer
    uses the gradients. With a loss scale, which skips such steps, it is a warning, once for each module. A checked step
    costs a pass over all activations and their gradients, and one small message.

    The norm is logged as ``grad_norm`` (``grad_norm/0``, ``grad_norm/1`` ... with several optimizers) before clipping,
    over all ranks, and is also ``trainer.strategy.last_grad_norm``.

    Args:
        every_n_steps: check one optimizer step out of this many.
        checks: what to check.

    Raises:
        ValueError: for checks that this version does not have.
    """

    def __init__(self, every_n_steps: int = 1, checks: Sequence[Check] = ("nonfinite",)) -> None:
        check_positive("every_n_steps", every_n_steps)
        unknown = [check for check in checks if check not in get_args(Check)]
        if unknown or isinstance(checks, str):
            raise ValueError(f"checks must be a sequence of {', '.join(map(repr, get_args(Check)))}, got {checks!r}")
        if missing := [check for check in checks if check not in _BUILT]:
            raise ValueError(
                f"This version of lightning_effi does not carry out checks={missing!r}; use checks={_BUILT!r}"
            )
        self.every_n_steps = every_n_steps
        self.checks = tuple(checks)
        self.findings: list[Finding] = []
        """What was found so far, each once, in the order of time."""
        self._watch: NonfiniteWatch | None = None
        self._judged = False

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if not isinstance(trainer.strategy, MeshStrategy):
            raise ValueError(
                f"HealthCheck works with EffiStrategy, and the strategy is {type(trainer.strategy).__name__}:"
                f" {lightning_compat.belonging('HealthCheck')}"
            )

    @override
    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        if self._watch is not None or "nonfinite" not in self.checks or trainer.global_step % self.every_n_steps:
            return
        if (held := _strategy(trainer).modules_here) is None:
            return  # the first step splits the module; other stages' modules answer with NaN
        self._watch = NonfiniteWatch(pl_module, lambda name: any(_is_below(name, part) for part in held))
        self._watch.start()

    @override
    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        if self._watch is not None:
            self._watch.note_loss(loss)

    @override
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        strategy = _strategy(trainer)
        norm = self._log_norm(strategy, pl_module, optimizer)
        if self._watch is None:
            return
        self._judged = True
        found = self._watch.findings()
        if strategy.reduce_boolean_decision(bool(found) or not math.isfinite(norm), all=False):
            suspicions = (found, self._watch.suspicions(), _owner_of_first_nonfinite(pl_module))
            self._tell(trainer, _first_of_any_rank(suspicions, strategy))

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        if self._judged:
            self._stop()

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._stop()

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._stop()

    def _stop(self) -> None:
        if self._watch is not None:
            self._watch.stop()
        self._watch = None
        self._judged = False

    @staticmethod
    def _log_norm(strategy: MeshStrategy, module: pl.LightningModule, optimizer: Optimizer) -> float:
        precision = strategy.precision
        norm = precision.last_grad_norm = gradient_norm(precision.main_params(optimizer), stages=precision.stages)
        own = lightning_compat.unwrap_lightning_optimizer(optimizer)
        position = next(index for index, other in enumerate(strategy.optimizers) if other is own)
        key = "grad_norm" if len(strategy.optimizers) == 1 else f"grad_norm/{position}"
        module.log(key, norm, on_step=True, on_epoch=False)
        return float(norm)

    def _tell(self, trainer: pl.Trainer, findings: Sequence[Finding]) -> None:
        """End the run, or warn where the step will be skipped; each finding once.

        Raises:
            RuntimeError: on all ranks, where the optimizer would use the gradients.
        """
        fresh = [each for each in findings if each not in self.findings]
        self.findings += fresh
        if not fresh:
            return
        listed = "; ".join(map(str, fresh))
        advice = f"Use EffiPrecision(keep_fp32=['{fresh[0].module}']), a lower learning rate, or precision='bf16-mixed'"
        message = f"HealthCheck: in optimizer step {trainer.global_step + 1}, {listed}. {advice}"
        if _strategy(trainer).precision.scaler is None:
            raise RuntimeError(message)
        rank_zero_warn(f"{message}. The step is skipped, and the loss scale falls", category=UserWarning)


def _is_below(name: str, part: str) -> bool:
    return not part or f"{name}.".startswith(f"{part}.")


def _strategy(trainer: pl.Trainer) -> MeshStrategy:
    return trainer.strategy  # type: ignore[return-value]


def _owner_of_first_nonfinite(module: pl.LightningModule) -> list[Finding]:
    """Where no activation tells: the product that makes a weight's gradient may overflow by itself."""
    parameter = first_nonfinite(module)
    return [] if parameter is None else [Finding(parameter[1].rpartition(".")[0] or parameter[1], "backward")]


def _first_of_any_rank(suspicions: Sequence[list[Finding]], strategy: MeshStrategy) -> list[Finding]:
    """The strongest kind of suspicion that any rank has, from all ranks that have it, forward before backward."""
    mine = [[replace(each, rank=strategy.global_rank) for each in found] for found in suspicions]
    everybodys = [mine]
    if strategy.has_several_processes:
        everybodys = [mine] * strategy.layout.world_size
        dist.all_gather_object(everybodys, mine, group=strategy.context.groups.run.device)
    by_kind = [[each for ours in everybodys for each in ours[kind]] for kind in range(len(suspicions))]
    strongest = next((found for found in by_kind if found), [])
    forward = [each for each in strongest if each.pass_ == "forward"]
    return (forward or strongest)[:_LISTED]
