"""Steps without backward, and whether stages can run them one after the other.

The first batch of each step hook is run by all ranks together (see :mod:`.lockstep`), which look on. A step that does
as the first training step did, and hands nothing around a stage, goes through the stages from then on, where only the
last one holds what follows the blocks. All others are run together: two views of a batch, raw and averaged weights,
samples that are drawn token by token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_effi.comm.agreement import Agreement
from lightning_effi.pipeline_parallel.planning.plan import refuse_bypasses
from lightning_effi.pipeline_parallel.planning.trace import Trace, trace_step
from lightning_effi.pipeline_parallel.running.first_batch import FirstBatch, Planned, structure
from lightning_effi.pipeline_parallel.running.lockstep import Lockstep, Made
from lightning_effi.pipeline_parallel.running.randomness import StageRandomness
from lightning_effi.pipeline_parallel.stage_parameters import StageParameters

if TYPE_CHECKING:
    from lightning_effi.context import RunContext


class StepsTogether:
    """Runs steps on all ranks of the pipeline together.

    Args:
        context: of the run.
        module: the user's, split.
        first: what is known of its first batch.
        planned: the stages.
        stages: the parameters of this rank.
        randomness: of the pipeline.
    """

    def __init__(
        self,
        context: RunContext,
        module: Any,
        first: FirstBatch,
        planned: Planned,
        stages: StageParameters,
        randomness: StageRandomness,
    ) -> None:
        self._context, self._module, self._first, self._planned = context, module, first, planned
        self._stages, self._randomness = stages, randomness
        ranks = planned.pipeline.ranks
        everywhere = tuple(range(len(ranks)))
        self._holders = {
            name: tuple(rank for rank, held in enumerate(ranks) if name in (*held.blocks, *held.units)) or everywhere
            for name in first.everywhere
        }
        held = {name: tuple(r for r, each in enumerate(ranks) if name in each.parameters) for name in stages.names}
        self._parameter_holders = {name: found for name, found in held.items() if 0 < len(found) < len(ranks)}
        self._agreement = Agreement(context.groups.pipeline.control)
        self._known: dict[Any, Made] = {}
        self._without: dict[Any, bool] = {}

    def can_do_without(self, step: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether a first batch has shown that ``step`` goes through the stages one after the other."""
        return self._without.get(_key(step, args, kwargs), False)

    def run(self, step: Callable[..., Any], batch: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What the step returns, on every rank; it logs and updates metrics on every rank, too."""
        pipeline, interception = self._context.groups.pipeline, self._first.interception
        together = Lockstep(
            interception,
            self._holders,
            self._stages.in_place_of(self._parameter_holders),
            self._parameter_holders,
            group=pipeline.device,
            control=pipeline.control,
            device=self._context.device,
            randomness=self._randomness,
            known=self._known,
        )
        call = partial(step, batch, *args, **kwargs)
        key = _key(step, args, kwargs)
        seeded, context = self._randomness.of_microbatch(0), self._context.precision.forward_context()
        with torch.no_grad(), seeded, context, together:
            if key in self._without:
                with interception.handled_by(lambda *given: together.call(*given)[0]):
                    output = call()
            else:
                run = lambda *given: (*together.call(*given), 0)  # noqa: E731
                trace, output = trace_step(self._module, self._first.trunk, interception, call, run, is_tolerant=True)
                self._decide(key, trace)
            together.reveal(output)
        return output

    def _decide(self, key: Any, trace: Trace) -> None:
        if trace.refused is None and structure(trace) == structure(self._planned.trace):
            firsts = list(accumulate(len(stage.blocks) for stage in self._planned.pipeline.stages))[:-1]
            try:
                refuse_bypasses(trace, firsts)
            except ValueError as error:
                trace.refused = str(error)
        elif trace.refused is None:
            trace.refused = "it runs other blocks than the first training_step, or hands them other arguments"
        # a rank only sees what is made of the parameters that it holds
        reasons = [found for found in self._agreement.gather(trace.refused) if found is not None]
        self._without[key] = not reasons
        if reasons and trace.blocks:
            rank_zero_info(
                f"pipeline: {key[0]} does not go through the stages one after the other"
                f" ({reasons[0].removeprefix('pipeline: ')}), so all ranks run it together"
            )


def _key(step: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The hook, and the index of the loader where there are several."""
    return name_of(step), tuple(args[1:]), kwargs.get("dataloader_idx")


def name_of(step: Callable[..., Any]) -> str:
    """Of a step hook, which tensor parallelism may have wrapped."""
    while isinstance(step, partial):
        step = step.args[0]
    return step.__name__
