"""The steps of a run, carried out by a pipeline."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_effi.comm.agreement import Agreement
from lightning_effi.data_parallel.casting import computed_in
from lightning_effi.data_parallel.optimizers import DetachedOptimizers
from lightning_effi.microbatches.evidence import evidence_of
from lightning_effi.microbatches.logs import StepResult, captured_logs, log_all
from lightning_effi.microbatches.split import Piece, shapes, tensors
from lightning_effi.modules.draws import SameForAllRows
from lightning_effi.modules.parameters import describe_parameters
from lightning_effi.modules.randomness import Randomness
from lightning_effi.modules.restore import loss_of, restored, same_randomness
from lightning_effi.modules.state_changes import changed_by
from lightning_effi.modules.trunk import find_trunk
from lightning_effi.pipeline_parallel.engine import PipelineEngine
from lightning_effi.pipeline_parallel.intercept import Interception, TensorMeta
from lightning_effi.pipeline_parallel.kept import KeptTensors
from lightning_effi.pipeline_parallel.metrics import MetricSync
from lightning_effi.pipeline_parallel.planning.plan import PipelinePlan, plan_stages
from lightning_effi.pipeline_parallel.planning.schedule import (
    Action,
    Schedule,
    forward_schedule,
    legal_microbatches,
    make_schedule,
    place_stages,
)
from lightning_effi.pipeline_parallel.planning.timeline import Timeline
from lightning_effi.pipeline_parallel.planning.trace import Trace, trace_step
from lightning_effi.pipeline_parallel.running.backward import backward_of_inputs, differentiable
from lightning_effi.pipeline_parallel.running.exchange import Exchange
from lightning_effi.pipeline_parallel.running.runtime import execute
from lightning_effi.pipeline_parallel.running.stage import LiveStage
from lightning_effi.pipeline_parallel.stage_parameters import StageParameters
from lightning_effi.pipeline_parallel.tree import tree_map
from lightning_effi.tensor_parallel.planning.plan import TensorPlan

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from lightning_effi.context import RunContext
    from lightning_effi.tensor_parallel.run import TensorRun


@dataclass(frozen=True)
class Planned:
    """What the first batch has shown of the whole module.

    Attributes:
        pipeline: which stage runs what.
        tensor: how the blocks are split among the ranks of a stage, with tensor parallelism.
        trace: of the step.
        loss: of the whole module, which the stages must compute as well.
    """

    pipeline: PipelinePlan
    tensor: TensorPlan | None
    trace: Trace
    loss: float


class PipelineRunner:
    """Splits the module on its first training step, and runs steps through the stages from then on.

    The first batch goes through :meth:`plan`, :meth:`keep_stage`, :meth:`start` and :meth:`verify`, in this order;
    between them the module is split by tensor parallelism and sharded.

    Args:
        context: of the run.
        module: whole until :meth:`keep_stage`.
        tensor: of the ranks that hold a stage together.

    Attributes:
        stage: this rank's place in the pipeline, which is its stage where every rank has one.
    """

    def __init__(self, context: RunContext, module: pl.LightningModule, tensor: TensorRun) -> None:
        self._context = context
        self._module: Any = module
        self._at_work: PipelineEngine | None = None
        self._tensor = tensor
        self._config = context.config.pipeline
        _refuse_own_backward(module, self._config.schedule)
        self._group = group = context.groups.pipeline.device
        self._ranks = dist.get_process_group_ranks(group)
        self.stage = dist.get_rank(group)
        self.stages: StageParameters | None = None
        self._plan: PipelinePlan | None = None
        self._interception: Interception | None = None
        self._placement = place_stages(self._config.schedule, len(self._ranks), self._config.virtual_stages)
        self._live: dict[int, LiveStage] = {}
        self._told_count = False
        self._metrics = MetricSync(self._module, group)
        self._traces: dict[Any, Trace] = {}
        self._structure: Any = None
        self._comparing = False
        self._seed = torch.tensor(torch.initial_seed() % (1 << 62))
        dist.broadcast(self._seed, self._ranks[0], group=context.groups.pipeline.control)

    # -- splitting -----------------------------------------------------------------------------------------------------

    def plan(self, piece: Piece, args: Sequence[Any], microbatches: int) -> Planned:
        """On the first batch, which the whole module runs: trace it, and decide which stage runs what.

        Raises:
            ValueError: on all ranks, where the module cannot be cut; names what is in the way.
        """
        self._refuse_different_batches(piece.data)
        module, config, compute = self._module, self._config, self._context.precision.compute
        self._trunk = trunk = find_trunk(module)
        kept = KeptTensors({name: module.get_submodule(name) for name in (*trunk.blocks, *trunk.units)})
        with computed_in(compute, module), restored(module):
            loss = self._whole_loss(piece, args)
            kept.note()
        tensor = self._plan_tensor(piece, args)
        with computed_in(compute, module):
            self._interception = Interception(module, trunk.blocks, trunk.units, kept)
        try:
            with computed_in(compute, module):
                trace = self._trace(module.training_step, piece.data, args)
            parameters = _parameters_below(module, (*trunk.blocks, *trunk.units))
            numels = {info.name: info.numel for info in describe_parameters(module)}
            sizes = len(self._placement) if config.split == "auto" else config.split
            stages, boundaries, shared = plan_stages(trace, parameters, numels, sizes, config.stages_per_rank)
        except Exception as error:
            self._interception.remove()
            self._agree(error, None)
            raise
        agreed = self._agree(None, (_structure(trace), [len(stage.blocks) for stage in stages]))
        if agreed is not None:
            stages, boundaries, shared = plan_stages(trace, parameters, numels, agreed, config.stages_per_rank)
        timeline = Timeline.of(self._schedule(microbatches))
        plan = PipelinePlan(stages, boundaries, shared, timeline, self._placement)
        return Planned(plan, tensor, trace, loss)

    def keep_stage(self, planned: Planned, optimizers: DetachedOptimizers) -> StageParameters:
        """Let go of the other stages' parameters; whole steps go through the stages from here on."""
        assert self._interception is not None
        plan = self._plan = planned.pipeline
        held = plan.ranks[self.stage]
        self._structure = _structure(planned.trace)
        pipelines = self._context.layout.pipelines()
        self.stages = StageParameters(self._module, plan, self.stage, self._group, pipelines, optimizers)
        everywhere = {*self._trunk.blocks, *self._trunk.units}
        self._interception.elsewhere = frozenset(everywhere - {*held.blocks, *held.units})
        self._live = {
            stage: LiveStage(plan, stage, self._interception, partial(self._draw_differently, stage))
            for stage, rank in enumerate(self._placement)
            if rank == self.stage
        }
        return self.stages

    def start(self, engine: PipelineEngine) -> None:
        """Run steps on ``engine`` from here on."""
        self._at_work = engine

    @property
    def engine(self) -> PipelineEngine:
        """Of the parameters and gradients of the stage, once it has started."""
        assert self._at_work is not None
        return self._at_work

    def verify(self, planned: Planned, piece: Piece, args: Sequence[Any]) -> None:
        """Prove that the stages compute what the whole module did.

        Raises:
            RuntimeError: on all ranks, where they do not.
        """
        self._refuse_another_loss(piece, args, planned.loss)

    def _agree(self, error: Exception | None, planned: tuple[Any, list[int]] | None) -> list[int] | None:
        """Nobody goes on where planning failed on one rank; pipelines whose batches balance differently cut alike.

        Args:
            error: why it failed here.
            planned: what the step calls, and how many blocks each stage has.

        Returns:
            the blocks of each stage where those of this rank are not the ones to be used.

        Raises:
            RuntimeError: where another rank could not plan, or its step does something else.
        """
        assert self._interception is not None
        everybody = Agreement(self._context.groups.run.control).gather((error and str(error), planned))
        failed = next((rank for rank, (message, _) in enumerate(everybody) if message is not None), None)
        if error is not None or planned is None:
            return None
        if failed is not None:
            self._interception.remove()
            raise RuntimeError(f"pipeline: rank {failed} could not plan: {everybody[failed][0]}")
        structure, sizes = everybody[0][1]
        if any(found[0] != structure for _, found in everybody):
            self._interception.remove()
            raise RuntimeError(
                "pipeline: on the first batches of some ranks, training_step runs other blocks, or hands them other"
                " arguments, than on those of others. All steps must do the same. Use pipeline_parallel_size=1"
            )
        return None if sizes == planned[1] else sizes

    def _plan_tensor(self, piece: Piece, args: Sequence[Any]) -> TensorPlan | None:
        """How blocks are split among the ranks of a stage; found before anything stands between them and a step."""
        precision = self._context.precision
        if not self._tensor.is_pending:
            return None
        with torch.inference_mode(False), computed_in(precision.compute, self._module), precision.train_step_context():
            return self._tensor.plan(self._module, self._module.training_step, (piece.data, *args), {})

    def make_whole(self, optimizers: Sequence[Optimizer]) -> None:
        """Every rank holds the whole module again, as an ordinary one, and its optimizers' states."""
        if self.stages is not None:
            self.stages.make_whole()
            self.stages.return_to_optimizers(optimizers)
        self.stages = self._at_work = None
        self.leave()

    def leave(self) -> None:
        """Blocks are called as they were written again, whichever of them this rank holds."""
        if self._interception is not None:
            self._interception.remove()
        self._interception = None

    def _refuse_different_batches(self, batch: Any) -> None:
        """All stages must work on the same batch; a dataset that draws its own random numbers gives them others."""
        state = 0
        for tensor in tensors(batch).values():
            state = zlib.crc32(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes(), state)
        states = torch.tensor([state, -state])
        dist.all_reduce(states, dist.ReduceOp.MAX, group=self._context.groups.pipeline.control)
        if states[0] != -states[1]:
            raise RuntimeError(
                "pipeline: the ranks of one pipeline were given different batches. The dataset or its transforms must"
                " draw the same random numbers on all of them: seed with seed_everything(..., workers=True), and"
                " let data depend on strategy.data_parallel_rank, not on the global rank"
            )

    def _whole_loss(self, piece: Piece, args: Sequence[Any]) -> float:
        with self._comparably(), self._seeded(0), captured_logs(self._module):
            output = self._module.training_step(piece.data, *args)
        return float("nan") if output is None else float(loss_of(output))

    def _refuse_another_loss(self, piece: Piece, args: Sequence[Any], expected: float) -> None:
        with restored(self._module):
            [result] = self.compare([piece], args)
        found = float("nan") if result.loss is None else float(result.loss)
        if not math.isfinite(expected):
            rank_zero_info("pipeline: not compared, since the whole module's own loss is not finite")
            return
        bound = 1e-4 if self._context.precision.precision in ("32-true", "64-true") else 2e-2
        if not abs(found - expected) <= bound * max(1.0, abs(expected)):
            raise RuntimeError(
                f"pipeline: the stages compute the loss {found:.6g} where the whole module computes {expected:.6g}."
                " Nothing was trained. Blocks may only hand on what they return (not what they put into a list or into"
                " their arguments). Use pipeline_parallel_size=1"
            )

    # -- steps ---------------------------------------------------------------------------------------------------------

    def train(
        self, pieces: Sequence[Piece], weights: Sequence[float], scale: float, args: Sequence[Any]
    ) -> list[StepResult]:
        """Forward and backward of all pieces in the order of the schedule; every rank returns the same results."""
        schedule = self._schedule(len(pieces))
        factors = [weight * scale for weight in weights]
        data = [piece.data for piece in pieces]
        results = self.engine.run_step(self._run, schedule, self._module.training_step, data, args, factors)
        self.engine.after_backward()
        self._metrics.follow(self._placement[-1])
        return results

    def compare(self, pieces: Sequence[Piece], args: Sequence[Any]) -> list[StepResult]:
        """Forward of each piece without gradients and dropout, with the same random numbers for all rows."""
        data = [piece.data for piece in pieces]
        with self._comparably():
            return self.engine.run_step(self._forward_only, self._module.training_step, data, args)

    def changes(self, piece: Piece, args: Sequence[Any]) -> list[str]:
        """What ``training_step`` changes on this stage besides gradients."""
        step = self._module.training_step
        run = partial(self._forward_only, step, [piece.data], args)
        with self._comparably():
            return self.engine.run_step(changed_by, self._module, run)

    def evaluate(self, step: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any) -> Any:
        """``validation_step`` and its like: the batch goes through the stages uncut, so that all values are exact."""
        [result] = self.engine.run_step(self._forward_only, step, [batch], args, kwargs)
        self._metrics.follow(self._placement[-1])
        log_all(self._module, result.logged)
        return result.output

    def _forward_only(
        self, step: Callable[..., Any], batches: Sequence[Any], args: Sequence[Any], kwargs: Mapping[str, Any] = {}
    ) -> list[StepResult]:
        schedule = forward_schedule(self._placement, len(batches))
        with torch.no_grad():
            return self._run(schedule, step, batches, args, None, kwargs)

    def _run(
        self,
        schedule: Schedule,
        step: Callable[..., Any],
        batches: Sequence[Any],
        args: Sequence[Any],
        factors: Sequence[float] | None,
        kwargs: Mapping[str, Any] = {},
    ) -> list[StepResult]:
        traces = [self._checked_trace(step, batch, args, kwargs) for batch in batches]
        assert self._plan is not None
        firsts = [stage.blocks[0] for stage in self._plan.stages[1:]]
        early: dict[tuple[int, int], Any] = {}
        results: list[StepResult] = [StepResult(None, None) for _ in batches]
        comparing = factors is None

        def forward(action: Action, received: list[Tensor]) -> list[Tensor]:
            live, index = self._live[action.stage], action.microbatch
            seeded, context = self._seeded(0 if comparing else index), self._context.precision.forward_context()
            counted = nullcontext() if live.is_last or len(self._live) == 1 else self._metrics.unchanged()
            with seeded, context, counted, captured_logs(self._module) as logged:
                sent, output = live.run(
                    received,
                    lambda: step(batches[index], *args, **kwargs),
                    lambda: [_empty(meta) for meta in traces[index].metas[firsts[action.stage]]],
                )
            for number, call in enumerate(logged):
                if not live.is_last and action.stage == self._stage_of_log(traces[index], number):
                    early[index, number] = call.value
            if live.is_last:
                loss = loss_of(output) if output is not None and (not comparing or _has_loss(output)) else None
                results[index] = StepResult(loss, output, logged, None if loss is None else evidence_of(loss))
            return sent

        def backward(
            action: Action, outputs: list[Tensor], gradients: list[Tensor] | None, inputs: list[Tensor]
        ) -> Callable[[], None] | None:
            assert factors is not None
            if gradients is not None:
                outputs, gradients = differentiable(outputs, gradients)
            else:
                result, factor = results[action.microbatch], factors[action.microbatch]
                results[action.microbatch] = _detached(result)
                outputs = [result.loss * factor] if result.loss is not None and factor else []
            if action.kind == "I":
                backward_of_parameters = backward_of_inputs(outputs, gradients, inputs)

                def finish() -> None:
                    backward_of_parameters()
                    self.engine.after_microbatch()

                return finish
            if gradients is not None:
                torch.autograd.backward(outputs, gradients)
            for loss in outputs if gradients is None else ():
                self._module.backward(loss)
            self.engine.after_microbatch()
            return None

        metas = [[trace.metas[block] for block in firsts] for trace in traces]
        exchange = Exchange(schedule, self.stage, self._ranks, self._group, metas)
        execute(schedule, self.stage, exchange, forward, backward)
        self._collect_early_logs(traces, early, results)
        return self._share(results)

    def _stage_of_log(self, trace: Trace, number: int) -> int:
        """The stage that knows what the step's ``number``-th call of ``self.log`` is given; no one's is the last's."""
        assert self._plan is not None
        last = len(self._placement) - 1
        position = trace.logged[number] if number < len(trace.logged) else None
        return last if position is None else self._plan.stage_of(position)

    def _collect_early_logs(
        self, traces: Sequence[Trace], early: dict[tuple[int, int], Any], results: Sequence[StepResult]
    ) -> None:
        """What the step logs between its blocks is only known on their stage; the last one tells of all."""
        last = len(self._placement) - 1
        if all(self._stage_of_log(trace, i) == last for trace in traces for i in range(len(trace.logged))):
            return
        cpu = torch.device("cpu")
        everybodys: list[Any] = [None] * len(self._ranks)
        mine = {key: value.to(cpu) if isinstance(value, Tensor) else value for key, value in early.items()}
        dist.all_gather_object(everybodys, mine, group=self._group)
        if self.stage == self._placement[-1]:
            for (index, number), value in (item for each in everybodys for item in each.items()):
                results[index].logged[number].value = value

    def fitting(self, microbatches: int) -> int:
        """The largest number of micro-batches up to this one that the schedule can have."""
        name = self._config.schedule
        count = legal_microbatches(name, len(self._ranks), microbatches)
        if count != microbatches and not self._told_count:
            self._told_count = True
            rank_zero_info(
                f"lightning_effi: pipeline={name!r} on {len(self._ranks)} ranks cannot have {microbatches}"
                f" micro-batches; batches are cut into {count}"
            )
        return count

    def _schedule(self, microbatches: int) -> Schedule:
        return make_schedule(self._config.schedule, len(self._ranks), microbatches, self._config.virtual_stages)

    def _share(self, results: list[StepResult]) -> list[StepResult]:
        """The last stage's results on every rank, so that all log, return and decide the same."""
        last = self._placement[-1]
        message: list[Any] = [None]
        if self.stage == last:
            # a tensor of another rank's device would arrive on that device
            message = [[_moved(self._metrics.portable(_detached(result)), torch.device("cpu")) for result in results]]
        dist.broadcast_object_list(message, self._ranks[last], group=self._group)
        return [self._metrics.local(_moved(result, self._context.device)) for result in message[0]]

    # -- shapes --------------------------------------------------------------------------------------------------------

    def _checked_trace(
        self, step: Callable[..., Any], batch: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Trace:
        """What ``step`` does with a batch like this one, with the shapes of what crosses each boundary."""
        trace = self._trace(step, batch, args, kwargs)
        if _structure(trace) != self._structure:
            name = getattr(step, "__name__", "the step")
            raise RuntimeError(
                f"pipeline: {name} runs other blocks, or in another order, or hands them other arguments, than the"
                " first training_step, by which the module was split. All steps must do the same"
            )
        return trace

    def _trace(
        self, step: Callable[..., Any], batch: Any, args: Sequence[Any], kwargs: Mapping[str, Any] = {}
    ) -> Trace:
        assert self._interception is not None
        dtypes = self._context.precision.autocasts
        key = (getattr(step, "__name__", step), shapes(batch), dtypes, torch.is_grad_enabled(), self._module.training)
        if key not in self._traces:
            module = self._module
            run = partial(step, batch, *args, **kwargs)
            with restored(module), captured_logs(module) as logged, self._context.precision.forward_context():
                self._traces[key] = trace_step(module, self._trunk, self._interception, run, logged)
        return self._traces[key]

    # -- randomness ----------------------------------------------------------------------------------------------------

    @contextmanager
    def _seeded(self, microbatch: int) -> Iterator[None]:
        """Code that every stage passes through draws the same numbers on all of them, in each micro-batch others."""
        trainer = self._module.trainer
        with same_randomness(self._module):
            self._number = (int(self._seed), trainer.global_step, trainer.fit_loop.batch_idx, microbatch)
            Randomness(self._module).seed(*self._number)
            yield

    def _draw_differently(self, stage: int) -> None:
        if self._comparing:  # with the whole module, which draws one number after the other
            return
        Randomness(None).seed(*self._number, stage)

    @contextmanager
    def _comparably(self) -> Iterator[None]:
        self._comparing = True
        try:
            with torch.no_grad(), SameForAllRows(), self._context.precision.train_step_context():
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


def _refuse_own_backward(module: Any, schedule: str) -> None:
    """``zb1p`` and ``zbv`` run the two halves of a backward at different times, and a method has only one."""
    if schedule in ("zb1p", "zbv") and is_overridden("backward", module):
        raise ValueError(
            f"pipeline={schedule!r} takes backwards apart, and {type(module).__name__} has a backward() of its own. Use"
            " pipeline='1f1b' or 'interleaved', or leave backward() out"
        )


def _structure(trace: Trace) -> Any:
    """What must be the same in every step: blocks, their order, and where computed values are among their arguments."""
    return trace.blocks, trace.arguments


def _parameters_below(module: nn.Module, names: Sequence[str]) -> dict[str, list[str]]:
    """First names of the parameters of each module named."""
    first = {id(parameter): name for name, parameter in module.named_parameters()}
    return {name: [first[id(p)] for p in module.get_submodule(name).parameters()] for name in names}


def _empty(meta: TensorMeta) -> Tensor:
    return torch.zeros(meta.shape, dtype=meta.dtype, device=meta.device)


def _has_loss(output: Any) -> bool:
    return isinstance(output, Tensor) or (isinstance(output, Mapping) and isinstance(output.get("loss"), Tensor))


def _moved(result: StepResult, device: torch.device) -> StepResult:
    def move(value: Any) -> Any:
        return value.to(device) if isinstance(value, Tensor) else value

    for call in result.logged:
        call.value = move(call.value)
    return StepResult(move(result.loss), tree_map(move, result.output), result.logged, result.evidence)


def _detached(result: StepResult) -> StepResult:
    def detach(value: Any) -> Any:
        return value.detach() if isinstance(value, Tensor) else value

    return StepResult(detach(result.loss), tree_map(detach, result.output), result.logged, result.evidence)
