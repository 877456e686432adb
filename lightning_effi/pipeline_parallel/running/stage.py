"""One stage at work: the user's step, of which only this stage's blocks are real."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointFunction

from lightning_effi.compat import torch as torch_compat
from lightning_effi.modules.user_code import here
from lightning_effi.pipeline_parallel.intercept import Interception, StageDone, bind, resolved
from lightning_effi.pipeline_parallel.origins import StandInWatch
from lightning_effi.pipeline_parallel.planning.plan import PipelinePlan
from lightning_effi.pipeline_parallel.tree import tree_leaves


class LiveStage:
    """Runs a step up to the end of one stage.

    Blocks of earlier stages, and units of other stages, return stand-ins, of which nothing real may be made. At the
    stage's own first block the received tensors take the place of those among its arguments, and wherever else the same
    object is an argument of a block; the call of the next stage's first block ends the step, and its arguments are what
    is sent.

    Args:
        plan: of the pipeline.
        index: of this stage.
        interception: of the module.
        on_entry: called right before the stage's own first block (to let stages draw different random numbers).
    """

    def __init__(
        self, plan: PipelinePlan, index: int, interception: Interception, on_entry: Callable[[], None]
    ) -> None:
        blocks = [name for stage in plan.stages for name in stage.blocks]
        self._number = {name: number for number, name in enumerate(blocks)}
        self._first = self._number[plan.stages[index].blocks[0]]
        self._end = self._first + len(plan.stages[index].blocks)
        self._units = frozenset(plan.stages[index].units)
        self._known_units = frozenset(unit for stage in plan.stages for unit in stage.units)
        self._arguments = [boundary.arguments for boundary in plan.boundaries]
        self.index = index
        self.is_last = index == len(plan.stages) - 1
        self._interception = interception
        self._on_entry = on_entry
        self._received: Sequence[Tensor] = ()
        self._with_gradients = False
        self._next = 0
        self._watch = StandInWatch()

    def run(self, received: Sequence[Tensor], step: Callable[[], Any]) -> tuple[list[Tensor], Any]:
        """What the next stage receives, or (on the last stage) what the step returned.

        Nothing is sent where the step returns ``None`` before it calls any block, on all stages alike.

        Args:
            received: from the stage before.
            step: the user's.

        Raises:
            RuntimeError: where the step does not do what the first one did.
        """
        self._received, self._next, self._with_gradients = received, 0, torch.is_grad_enabled()
        self._watch = StandInWatch()
        try:
            with self._watch, self._interception.handled_by(self._answer):
                output = step()
        except StageDone as done:
            return done.outputs, None
        finally:
            self._received = ()
        if output is None and self._next == 0:
            return [], None
        if not self.is_last:
            raise RuntimeError(
                f"pipeline: the step went on after the end of stage {self.index}: it catches BaseException around the"
                " model, or did not call all blocks. Use pipeline_parallel_size=1"
            )
        if self._next != self._end:
            raise RuntimeError("pipeline: the step did not call all of the blocks that the first one called")
        self._refuse_unknown(tree_leaves(output), "what the step returns")
        return [], output

    def knows(self, value: Any) -> bool:
        """Whether ``value``, of the last :meth:`run`, was computed from what this stage knows."""
        return self._watch.source(value) is None

    def _answer(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        number = self._number.get(name)
        if number is None:
            return self._answer_unit(name, args, kwargs)
        if number != self._next:
            raise RuntimeError(
                f"pipeline: block '{name}' is called as number {self._next + 1} of the step{here()}, and was number"
                f" {number + 1} in the first one. All steps must run the same blocks in the same order"
            )
        if self._with_gradients and not torch.is_grad_enabled() and _is_in_reentrant_checkpoint():
            raise RuntimeError(
                f"pipeline: block '{name}' is run without gradients, as activation checkpointing with"
                " use_reentrant=True does, which detaches it from what the stage received. Pass use_reentrant=False"
            )
        self._next += 1
        if number < self._first:
            return self._stand_in(name, args, kwargs)
        if number == self._first and self.index > 0:
            self._bind(args, kwargs)
        args, kwargs = resolved((args, kwargs))
        leaves = tree_leaves((args, kwargs))
        if number == self._end:
            sent = [leaves[i] for i in self._arguments[self.index]]
            self._refuse_unknown(sent, f"an argument of '{name}'")
            raise StageDone(sent)
        self._refuse_unknown(leaves, f"an argument of '{name}'")
        with torch_compat.function_mode_left(self._watch):
            return self._interception.run(name, args, kwargs)

    def _answer_unit(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name in self._units:
            unknown = self._watch.source(tree_leaves((args, kwargs)))
            with torch_compat.function_mode_left(self._watch):
                output = self._interception.run(name, args, kwargs)
            if unknown is not None:
                self._watch.mark(output, unknown)
            return output
        if name in self._known_units:
            return self._stand_in(name, args, kwargs)
        raise RuntimeError(
            f"pipeline: '{name}' is called{here()}, and was not in the first step. All steps must run the same modules"
        )

    def _stand_in(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        output, left = self._interception.stand_in(name, args, kwargs)
        self._watch.mark((output, left), name)
        return output

    def _refuse_unknown(self, leaves: list[Any], what: str) -> None:
        name = self._watch.source(leaves)
        if name is not None:
            raise RuntimeError(
                f"pipeline: {what} depends on a value that '{name}' computes on another stage{here()}, which the first"
                " step's did not. Hand it on as an argument of the blocks, or use pipeline_parallel_size=1"
            )

    def _bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        leaves = tree_leaves((args, kwargs))
        for position, tensor in zip(self._arguments[self.index - 1], self._received, strict=True):
            placeholder = leaves[position]
            if placeholder.shape != tensor.shape or placeholder.dtype != tensor.dtype:
                raise RuntimeError(
                    f"pipeline: stage {self.index} received a tensor of shape {tuple(tensor.shape)} and"
                    f" {tensor.dtype} where its first block takes {tuple(placeholder.shape)} and {placeholder.dtype}"
                )
            bind(placeholder, tensor)
        self._on_entry()


def _is_in_reentrant_checkpoint() -> bool:
    """Code may also run frozen blocks under ``no_grad``; only who calls tells one from the other."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code is CheckpointFunction.forward.__code__:
            return True
        frame = frame.f_back
    return False
