"""One ``training_step`` of Lightning, carried out in micro-batches.

Lightning's order is ``training_step``, ``zero_grad``, ``backward``. Activations are only freed by backward, so all
micro-batches run forward and backward inside ``training_step``; their gradients are put aside while ``zero_grad``
clears those of the last step, and are there again when ``backward`` returns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Protocol

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn

from lightning_effi.comm.agreement import Agreement
from lightning_effi.microbatches.logs import LogRules, StepResult, combine_outputs, log_all, weighted_sum
from lightning_effi.microbatches.retry import MemoryTrial
from lightning_effi.microbatches.sequential import SequentialRunner
from lightning_effi.microbatches.split import Piece, count_rows, split
from lightning_effi.microbatches.weight_choice import WeightChoice
from lightning_effi.modules.restore import restored

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from lightning_effi.config import EffiConfig
    from lightning_effi.context import RunContext
    from lightning_effi.data_parallel.engine import Engine
    from lightning_effi.gradients.window import AccumulationWindow


class Runner(Protocol):
    """Carries out the micro-batches of one step."""

    def fitting(self, microbatches: int) -> int: ...

    def train(
        self, pieces: Sequence[Piece], weights: Sequence[float], scale: float, args: Sequence[Any]
    ) -> list[StepResult]: ...

    def compare(self, pieces: Sequence[Piece], args: Sequence[Any]) -> list[StepResult]: ...

    def observe(self, piece: Piece, args: Sequence[Any]) -> tuple[StepResult, list[str]]: ...


class Verification(Protocol):
    """Compares the first batch with a step of the whole module."""

    def expect(self, parts: Sequence[tuple[Any, float]], args: Sequence[Any]) -> None: ...

    def compare(self, pieces: Sequence[Piece], weights: Sequence[float], args: Sequence[Any]) -> None: ...


class MicrobatchedStep:
    """Cuts each batch, weights the pieces, and hands Lightning the output of the whole batch.

    Args:
        context: of the run.
        module: whose ``training_step`` is carried out.
        engine: of its parameters and gradients.
        window: told how much a batch counts for, where gradients are sums.
        runner: how the pieces are run.
        count: pieces per batch; a batch of fewer rows has one a row.
        agreement: among all ranks that run a step together, or ``None``.
        prepare: of the first batch, what has to be done with its first piece before the pieces are run: given the
            piece, the arguments of the step after it and the number of pieces, it returns the engine at work.
        verification: of the first batch, where it is asked for.
    """

    def __init__(
        self,
        context: RunContext,
        module: pl.LightningModule,
        engine: Engine,
        window: AccumulationWindow,
        runner: Runner,
        count: int,
        agreement: Agreement | None,
        prepare: Callable[[Piece, Sequence[Any], int], Engine] | None = None,
        verification: Verification | None = None,
    ) -> None:
        self._context = context
        self._module = module
        self._engine = engine
        self._window = window
        self._prepare = prepare
        self._verification = verification
        self._runner = runner
        self._count = count
        self._agreement = agreement
        self._shelf = GradientShelf(module, engine)
        self._probed = False
        self._observed: tuple[Piece, StepResult] | None = None
        self._next: Piece | None = None  # whose first run may be that in which it is trained on
        self._trial: MemoryTrial | None = None
        if context.config.microbatches.oom_retry and isinstance(runner, SequentialRunner):
            self._trial = MemoryTrial(
                module, engine, context.device, lambda piece: runner.try_out(piece, self._args), agreement
            )
        self._told_whole: tuple[str, ...] = ()
        self._log_rules = LogRules()
        self._args: Sequence[Any] = ()
        config = context.config.microbatches
        self._sums = config.weight == "valid_labels"
        self._splitter = None if config.splitter is None else resolve_name(config.splitter)
        self._choice = WeightChoice(
            config,
            low_precision=self._compares_in_low_precision,
            agreement=agreement,
            run=self._compare,
            log_rules=self._log_rules,
        )

    @property
    def found(self) -> tuple[str, ...]:
        """What the batches so far have shown, as lines of the plan."""
        return self._choice.found

    @property
    def has_gradients(self) -> bool:
        """Whether gradients of the current batch wait for Lightning's ``backward``."""
        return self._shelf.is_filled

    def __call__(self, batch: Any, *args: Any) -> Any:
        """In place of ``training_step(batch, *args)``: forward and backward of all micro-batches."""
        module, precision = self._module, self._context.precision
        self._args = args
        if self._trial is not None and module.trainer.global_step == 0:
            self._count = self._trial.count_that_fits(self._count, lambda count: self._cut(batch, count)[1])
        rows, pieces = self._cut(batch, self._count)
        if self._verification is not None:
            self._verification.expect(self._choice.uncut(batch, pieces), args)
        whole = self._choice.first_question(batch, rows, pieces)
        one_by_one = whole if isinstance(self._runner, SequentialRunner) else None
        if not self._probed and (len(pieces) > 1 or self._context.layout.pipeline > 1):
            self._probe(one_by_one or pieces[0])
        self._next = pieces[0] if one_by_one is not None and self._is_exact else None
        weights = self._choice.weights(batch, rows, pieces)
        self._observed = self._next = None
        if self._prepare is not None:
            self._engine = self._prepare(pieces[0], args, len(pieces))
            self._prepare = None
        if self._verification is not None:
            self._verification.compare(pieces, weights, args)
            self._verification = None
        window = module.trainer.accumulate_grad_batches
        self._shelf.start(self._engine, is_first=module.trainer.fit_loop.batch_idx % window == 0)
        scale = precision.loss_scale
        amounts = self._choice.amounts(pieces) if self._sums else []
        if self._sums:  # sums over labels, divided when the window is closed
            results = self._runner.train(pieces, amounts, scale, args)
            if any(result.loss is not None for result in results):
                self._window.weigh(sum(amounts))
        else:
            results = self._runner.train(pieces, weights, scale / window, args)
        self._shelf.put_aside()
        self._choice.confirm(batch, rows, pieces, amounts or weights, [result.evidence for result in results])
        return self._output(results, weights, [piece.rows for piece in pieces])

    def give_gradients(self) -> None:
        """In place of autograd in Lightning's ``backward``."""
        self._shelf.give_back()

    def _cut(self, batch: Any, count: int) -> tuple[int, list[Piece]]:
        if self._splitter is not None:
            return self._split_by_user(batch, count)
        try:
            rows = count_rows(batch)
        except ValueError as error:
            raise ValueError(
                f"microbatches={count}: the batch cannot be cut by rows, since {error}. Give a function"
                ' (batch, n) -> list: Microbatches(splitter="package.function"), or use microbatches=1'
            ) from error
        if rows.whole and rows.whole != self._told_whole:
            self._told_whole = rows.whole
            rank_zero_info(
                f"lightning_effi: batches have {rows.count} rows; handed whole to each micro-batch:"
                f" {', '.join(rows.whole)}"
            )
        count = min(count, rows.count)
        if self._agreement is not None:  # ranks talk to each other in each piece, so all cut alike
            count = self._agreement.least(count)
        return rows.count, split(batch, rows.count, self._runner.fitting(count))

    def _split_by_user(self, batch: Any, count: int) -> tuple[int, list[Piece]]:
        """Pieces from the user's splitter; of packed sequences, which have no rows, each counts as one.

        Raises:
            ValueError: on all ranks, where they do not get the same number of pieces, or one of them gets none.
        """
        assert self._splitter is not None
        name = self._context.config.microbatches.splitter
        parts = list(self._splitter(batch, self._runner.fitting(count)))
        if parts and (legal := self._runner.fitting(len(parts))) != len(parts):
            raise ValueError(
                f"microbatches: splitter {name} returned {len(parts)} micro-batches, which the pipeline's schedule"
                f" cannot have; {legal} would do. Use pipeline='1f1b', or another number of pieces"
            )
        numbers = [len(parts)] if self._agreement is None else self._agreement.gather(len(parts))
        if len(set(numbers)) > 1 or not parts:
            raise ValueError(
                f"microbatches: splitter {name} returned {', '.join(map(str, numbers))} micro-batches on the ranks of"
                " one step, which needs the same number on all of them, and at least one"
            )
        pieces, start = [], 0
        for data in parts:
            try:
                rows = count_rows(data).count
            except ValueError as error:
                if self._context.config.microbatches.weight in ("auto", "samples"):
                    raise ValueError(
                        f"microbatches: splitter {name} returned a micro-batch whose rows cannot be counted, since"
                        f' {error}. Say how to weight it: Microbatches(weight="uniform" | "valid_labels" |'
                        ' "package.function")'
                    ) from error
                rows = 1
            pieces.append(Piece(data, start, start + rows))
            start += rows
        return start, pieces

    def _probe(self, piece: Piece) -> None:
        """The first run of a piece: it may serve a comparison, and shows what the step keeps.

        A step that keeps state would change it once a micro-batch.

        Raises:
            RuntimeError: on all ranks, naming what the step changes.
        """
        self._probed = True
        with restored(self._module), self._compared_precision():
            result, changed = self._runner.observe(piece, self._args)
        self._observed = piece, result
        if self._agreement is not None:
            changed = sorted(set().union(*self._agreement.gather(changed)))
        if changed:
            names = ", ".join(f"'{name}'" for name in changed[:5]) + (" ..." if len(changed) > 5 else "")
            alone = "pipeline_parallel_size=1 with " if self._context.layout.pipeline > 1 else ""
            elsewhere = ", and only on the stage that runs it" if alone else ""
            raise RuntimeError(
                f"microbatches={self._count}: training_step changes {names}, and would do so once for each micro-batch"
                f"{elsewhere}. Use {alone}microbatches=1 and accumulate_grad_batches, or change it in a hook such as"
                " on_train_batch_start; in place of BatchNorm use GroupNorm or LayerNorm, or freeze it with eval()"
            )

    def _compare(self, pieces: Sequence[Piece], alone: bool) -> list[StepResult]:
        """Results of ``pieces``: of the observed one from then, and of the one that is trained on next from that run.

        ``alone``: each is run now, for the comparison.
        """
        known = {} if alone or self._observed is None else {id(self._observed[0]): self._observed[1]}
        begun, self._next = None if alone else self._next, None
        wanted = [piece for piece in pieces if id(piece) not in known and piece is not begun]
        known.update(zip(map(id, wanted), self._compare_now(wanted), strict=True))
        if begun is not None and any(piece is begun for piece in pieces):
            assert isinstance(self._runner, SequentialRunner)
            known[id(begun)] = self._runner.begin(begun, self._args) or self._compare_now([begun])[0]
        return [known[id(piece)] for piece in pieces]

    def _compare_now(self, pieces: Sequence[Piece]) -> list[StepResult]:
        if isinstance(self._runner, SequentialRunner):
            self._runner.forget()  # before it is noted what the comparison puts back
        with restored(self._module), self._compared_precision():
            return self._runner.compare(pieces, self._args)

    def _compared_precision(self) -> AbstractContextManager[None]:
        return nullcontext() if self._is_exact else self._context.precision.in_fp32()

    @property
    def _is_exact(self) -> bool:
        """Whether losses are compared as they are computed in training, not in fp32."""
        return self._compares_in_low_precision() or not self._context.precision.precision.endswith("-mixed")

    def _compares_in_low_precision(self) -> bool:
        """Autocast can be left out, but parameters that are stored or gathered in 16 bits stay so."""
        precision = self._context.precision
        if precision.precision.endswith("-mixed"):
            return self._engine.is_sharded
        return precision.precision not in ("32-true", "64-true")

    def _output(self, results: Sequence[StepResult], weights: Sequence[float], rows: Sequence[int]) -> Any:
        losses = [result.loss for result in results]
        skipped = all(loss is None for loss in losses)
        if not skipped and any(loss is None for loss in losses):
            raise RuntimeError(
                "training_step returned None for some micro-batches of a batch and a loss for others; return a loss for"
                " all, or use microbatches=1"
            )
        log_all(self._module, self._log_rules.combine([result.logged for result in results], weights, rows))
        if skipped:
            return None
        loss = torch.as_tensor(weighted_sum([loss for loss in losses if loss is not None], weights))
        extra = combine_outputs(results, weights, rows)
        return {"loss": loss, **extra} if extra else loss


def refuse_uncuttable(module: pl.LightningModule, config: EffiConfig) -> None:
    """What is known before the first batch to be impossible in micro-batches.

    Raises:
        ValueError: naming the setting and the nearest one that works.
    """
    count = config.microbatches.count
    if not module.automatic_optimization:
        raise ValueError(
            f"microbatches={count} does not work with manual optimization, where training_step itself runs backward and"
            " steps the optimizer. Use microbatches=1"
        )
    if getattr(module, "_compiler_ctx", None) is not None:
        raise ValueError(
            "trainer.fit(torch.compile(module)) compiles the whole training_step, which neither micro-batches nor a"
            " pipeline can take apart. Give the module itself to trainer.fit, or use microbatches=1 and"
            " pipeline_parallel_size=1"
        )
    if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        raise ValueError(
            f"microbatches={count} cuts the batch that training_step is given, and {type(module).__name__}'s takes a"
            " dataloader_iter. Use microbatches=1, or training_step(self, batch, batch_idx)"
        )


class GradientShelf:
    """Keeps gradients made inside ``training_step`` out of reach of the ``zero_grad`` that follows it."""

    def __init__(self, module: pl.LightningModule, engine: Engine) -> None:
        self._module = module
        self._engine = engine
        self._kept: list[tuple[nn.Parameter, Tensor]] = []
        self._is_first = False
        self.is_filled = False

    def start(self, engine: Engine, *, is_first: bool) -> None:
        """Before the first micro-batch: at the start of a window, drop the last window's gradients.

        Lightning's ``zero_grad`` would only come when both are in memory.
        """
        self._engine = engine
        self.is_filled = True
        self._is_first = is_first
        self._kept.clear()  # of a step that returned no loss, after which no backward came
        self._engine.keep_unreduced(False)
        if is_first:
            for optimizer in self._module.trainer.optimizers:
                optimizer.zero_grad()

    def put_aside(self) -> None:
        """After the last micro-batch; only the first batch of a window is followed by ``zero_grad``."""
        if not self._is_first:
            return
        self._engine.keep_unreduced(True)
        for parameter in self._parameters():
            if parameter.grad is not None:
                self._kept.append((parameter, parameter.grad))
                parameter.grad = None

    def give_back(self) -> None:
        self._engine.keep_unreduced(False)
        for parameter, gradient in self._kept:
            parameter.grad = gradient
        self._kept.clear()
        self.is_filled = False

    def _parameters(self) -> Iterable[nn.Parameter]:
        """What ``optimizer.zero_grad()`` and ``module.zero_grad()`` reach."""
        found = {id(p): p for p in self._module.parameters()}
        for optimizer in self._module.trainer.optimizers:
            found.update({id(p): p for group in optimizer.param_groups for p in group["params"]})
        return found.values()
