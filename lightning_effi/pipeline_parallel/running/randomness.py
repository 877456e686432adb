"""What the stages of a pipeline draw: the same numbers in code that all pass through, others in their blocks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

from lightning_effi.modules.draws import SameForAllRows
from lightning_effi.modules.randomness import Randomness
from lightning_effi.precision import EffiPrecision


class StageRandomness:
    """Seeds each micro-batch, and each stage's own blocks within it.

    Args:
        module: whose own generators are seeded as well.
        precision: of the run.
        first: global rank of the pipeline's first stage, whose seed all take.
        control: the pipeline's ranks, with a backend for tensors on the CPU.
    """

    def __init__(self, module: Any, precision: EffiPrecision, first: int, control: Any) -> None:
        self._module = module
        self._precision = precision
        self._common = Randomness(None)
        self._comparing = False
        seed = torch.tensor(torch.initial_seed() % (1 << 62))
        dist.broadcast(seed, first, group=control)
        self._seed = int(seed)
        self._numbers: tuple[int, ...] = ()

    @cached_property
    def _everything(self) -> Randomness:
        """Found at the first step, when the module has what generators it has."""
        return Randomness(self._module)

    @contextmanager
    def of_microbatch(self, microbatch: int) -> Iterator[None]:
        """Code that every stage passes through draws the same numbers on all of them, in each micro-batch others."""
        trainer = self._module.trainer
        drawn = self._everything.get()
        self._numbers = (
            self._seed,
            trainer.global_step,
            trainer.fit_loop.batch_idx,
            0 if self._comparing else microbatch,
        )
        self._everything.seed(*self._numbers)
        try:
            yield
        finally:
            self._everything.set(drawn)

    def enter_stage(self, stage: int) -> None:
        """Its blocks draw other numbers than those of other stages."""
        if not self._comparing:  # with the whole module, which draws one number after the other
            self._common.seed(*self._numbers, stage)

    @contextmanager
    def of_call(self, number: int) -> Iterator[None]:
        """A block that one rank runs in a step of all: what they draw next is not moved by what it draws."""
        drawn = self._common.get()
        self._common.seed(*self._numbers, number)
        try:
            yield
        finally:
            self._common.set(drawn)

    @contextmanager
    def comparably(self) -> Iterator[None]:
        """Without gradients and dropout, with the same random numbers for all rows, however the module is cut."""
        self._comparing = True
        try:
            with torch.no_grad(), SameForAllRows(), self._precision.train_step_context():
                yield
        except RuntimeError as error:
            if "does not require grad" in str(error):
                error.add_note(
                    "lightning_effi: a step that takes gradients itself (torch.autograd.grad, a penalty) cannot be"
                    " cut into stages, whose losses are compared without gradients first. Use pipeline_parallel_size=1"
                )
            raise
        finally:
            self._comparing = False
