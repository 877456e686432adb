"""The probe in a run: before the first step, on the first real batch."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn

from lightning_effi.comm.broadcast import broadcast_states
from lightning_effi.data_parallel.casting import computed_in
from lightning_effi.modules.restore import NoDropout, backward_of, copied, loss_of, plain_gradients, restored, silent
from lightning_effi.modules.state_changes import undone_writes
from lightning_effi.verify.compare import Comparison, compare_tensors

if TYPE_CHECKING:
    from lightning_effi.context import RunContext
    from lightning_effi.data_parallel.engine import Engine

# Rounding of one forward and backward, by the lowest dtype computed with; a wrong gradient is off by far more. Models
# in fp64 may still compute in fp32 here and there, as the norms of transformers do.
# In bf16, sums of parts are rounded apart.
_TOLERANCES = {torch.float64: 1e-5, torch.float32: 1e-4, torch.bfloat16: 0.15}


# Parameters up to which "auto" keeps a copy of the whole module and its gradients; beyond, blocks are compared alone.
LARGEST = 1_000_000_000


@dataclass(frozen=True)
class Expected:
    """Loss and gradients of the plain module, averaged over the data-parallel ranks, and what they took."""

    loss: Tensor
    gradients: dict[str, Tensor]
    seconds: float = 0.0


class RunProbe:
    """Compares the first training step with that of the plain module, once.

    The plain step is one of the module itself where it is still whole when the first batch arrives, see
    :meth:`observe`; otherwise that of a copy from before sharding.

    Raises (in :meth:`before_first_step`):
        RuntimeError: on all ranks, where loss or a gradient differs, naming the worst parameter.
    """

    def __init__(self, context: RunContext) -> None:
        self._context = context
        self._plain: nn.Module | None = None
        self._expected: Expected | None = None
        self._is_off = False

    def may_observe(self, module: Any) -> bool:
        """Whether :meth:`observe` is wanted; says why not where one could expect it."""
        return self._is_wanted(module) and module.automatic_optimization

    def observe(self, module: Any, step: Callable[..., Any], args: Any, kwargs: Any) -> None:
        """Note loss and gradients of a step of the whole module, which leaves no trace in it."""
        started = time.monotonic()
        with undone_writes(module):
            plain = self._plain_step(module, step, copy.deepcopy(args), copy.deepcopy(kwargs))
        self._expected = Expected(*plain, time.monotonic() - started)

    def before_sharding(self, module: nn.Module) -> None:
        """Keep a copy if the run is to be verified; data parallelism infers nothing, so ``auto`` has no need to."""
        if self._expected is None and self._is_wanted(module):
            self._plain = copied(module).to(self._context.device)

    def _is_wanted(self, module: nn.Module) -> bool:
        context, verify = self._context, self._context.config.verify
        wanted = context.layout.tensor > 1 if verify == "auto" else verify
        if not wanted or not context.has_several_processes or self._is_off:
            return False
        numel = sum(parameter.numel() for parameter in module.parameters())
        self._is_off = verify == "auto" and numel > LARGEST
        if self._is_off:
            rank_zero_info(
                f"verify: each kind of block was compared with the plain one, the whole module was not, since"
                f" verify='auto' does so up to {LARGEST:,} parameters and it has {numel:,}. verify=True compares it too"
            )
        return not self._is_off

    def before_first_step(
        self, module: Any, engine: Engine, over: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> None:
        """Compare on the arguments of the first ``training_step``.

        Args:
            module: at work.
            engine: of its parameters and gradients.
            over: what a step hook runs as on the module, whose layers may be split.
            args: of the step.
            kwargs: likewise.
        """
        (plain, self._plain), (expected, self._expected) = (self._plain, None), (self._expected, None)
        if plain is None and expected is None:
            return
        if not module.automatic_optimization:
            rank_zero_info("verify: not compared, since with manual optimization training_step runs backward itself")
            return
        started = time.monotonic()
        if expected is None:
            assert plain is not None
            broadcast_states([*plain.parameters(), *plain.buffers()], self._context.groups.data.device)
            plain.train(module.training)
            plain._trainer = module._trainer  # type: ignore[assignment]
            step: Any = plain.training_step
            expected = Expected(*self._plain_step(plain, step, copy.deepcopy(args), copy.deepcopy(kwargs)))
        loss, gradients = self._parallel_step(module, engine, over, copy.deepcopy(args), copy.deepcopy(kwargs))
        if not all(bool(value.isfinite().all()) for value in (expected.loss, *expected.gradients.values())):
            rank_zero_info("verify: not compared, since the plain module's own loss or gradients are not finite")
            return
        comparison = compare_tensors({**gradients, "loss": loss}, {**expected.gradients, "loss": expected.loss})
        judge(comparison, self._context.precision.precision, time.monotonic() - started + expected.seconds)

    def _plain_step(
        self, plain: nn.Module, step: Callable[..., Any], args: Any, kwargs: Any
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """This rank's batch through a plain module, averaged over the ranks."""
        precision, group = self._context.precision, self._context.groups.data.device
        in_context = precision.train_step_context()
        with restored(plain), silent(plain), NoDropout(), computed_in(precision.compute, plain), in_context:
            loss, gradients = plain_gradients(plain, step, *args, **kwargs)
        averaged = {}
        for name, parameter in plain.named_parameters():
            if name in gradients:
                gradient = gradients[name]
                gradient = torch.zeros_like(parameter) if gradient is None else gradient.to(parameter.dtype)
                dist.all_reduce(gradient, group=group)
                averaged[name] = gradient.detach() / dist.get_world_size(group)
        return _mean(loss, group), averaged

    def _parallel_step(
        self, module: Any, engine: Engine, over: Callable[..., Any], args: Any, kwargs: Any
    ) -> tuple[Tensor, dict[str, Tensor]]:
        with engine.whole_window(), restored(module), silent(module), undone_writes(module), NoDropout():
            with self._context.precision.train_step_context():
                loss = loss_of(engine.run_step(over(module.training_step), *args, **kwargs))
            engine.before_backward(loss)
            backward_of(loss)
            engine.after_backward()
            engine.rest()
        gradients = {}
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                gradient = parameter.grad
                if gradient is not None and hasattr(gradient, "full_tensor"):
                    gradient = gradient.full_tensor()
                full = torch.zeros(parameter.shape, device=parameter.device) if gradient is None else gradient
                gradients[name] = full.detach().clone()
        engine.discard()
        return _mean(loss.detach(), self._context.groups.data.device), gradients


def judge(comparison: Comparison, precision: str, seconds: float) -> None:
    """Say that the comparison went well.

    Raises:
        RuntimeError: where it did not, naming the worst parameter.
    """
    dtype = {"32-true": torch.float32, "64-true": torch.float64}.get(precision, torch.bfloat16)
    if not comparison.within(_TOLERANCES[dtype]):
        name, distance = comparison.worst
        raise RuntimeError(
            f"verify: the parallel module does not compute what the plain one does: '{name}' is off by"
            f" {distance:.1e} (allowed {_TOLERANCES[dtype]:.0e}). Nothing was trained. Does training_step change"
            " parameters, draw random numbers other than dropout's, or read what forward hooks keep elsewhere than in"
            " the module they are given? Then verify=False leaves this comparison out"
        )
    rank_zero_info(f"verify: loss and gradients equal the plain module's ({comparison}; {seconds:.1f} s)")


def _mean(value: Tensor, group: Any) -> Tensor:
    value = value.detach().clone()
    dist.all_reduce(value, group=group)
    return value / dist.get_world_size(group)
