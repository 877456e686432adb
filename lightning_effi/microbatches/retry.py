"""Out of memory before the first update: smaller pieces, agreed by all ranks, with everything put back in between."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_effi.comm.agreement import Agreement
from lightning_effi.microbatches.split import Piece
from lightning_effi.modules.restore import restored

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from lightning_effi.config import EffiConfig
    from lightning_effi.data_parallel.engine import Engine

Cut = Callable[[int], Sequence[Piece]]
Trial = Callable[[Piece], None]


class MemoryTrial:
    """Finds the number of pieces with which a step fits into memory, by trying its largest piece.

    A trial runs forward and backward without a word to other ranks, so that a rank that fails leaves nobody waiting;
    then all agree. Gradients, buffers, counters, metrics and randomness are as before when it is over. A step in the
    middle of training is never run twice.

    Args:
        module: which is tried.
        engine: of its gradients.
        device: whose memory it is.
        trial: forward and backward of one piece.
        agreement: among all ranks that run a step together, or ``None``.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        engine: Engine,
        device: torch.device,
        trial: Trial,
        agreement: Agreement | None,
    ) -> None:
        self._module = module
        self._engine = engine
        self._device = device
        self._trial = trial
        self._agreement = agreement

    def count_that_fits(self, count: int, cut: Cut) -> int:
        """At least ``count`` pieces, twice as many after each failure.

        Raises:
            torch.OutOfMemoryError: on all ranks, where not even single rows fit.
        """
        while True:
            pieces = cut(count)
            error = self._try(max(pieces, key=lambda piece: piece.rows))
            failed = error is not None
            if self._agreement is not None:
                failed = self._agreement.any([failed])[0]
            if not failed:
                return count
            if max(piece.rows for piece in pieces) == 1 or len(pieces) < count:
                raise torch.OutOfMemoryError(
                    "oom_retry: a micro-batch of one row does not fit into the memory of every rank"
                    f" ({error or 'another rank has run out of it'}). Shard more, with zero_stage or more processes"
                )
            rank_zero_info(f"lightning_effi: out of memory with {count} micro-batches, trying {2 * count}")
            count *= 2

    def _try(self, piece: Piece) -> str | None:
        """The message of the error where memory ran out."""
        message = None
        with restored(self._module), self._engine.alone():
            try:
                self._trial(piece)
            except RuntimeError as error:  # of which OutOfMemoryError is one
                if not _is_out_of_memory(error):
                    raise
                message = str(error).splitlines()[0]
        self._engine.discard()
        if message is not None and self._device.type == "cuda":
            torch.cuda.empty_cache()
        return message


def refuse_retry(config: EffiConfig, data_parallel_size: int) -> None:
    """Where ranks talk to each other in the middle of a forward, none can fail alone.

    Raises:
        ValueError: naming the setting that works.
    """
    if not config.microbatches.oom_retry:
        return
    if config.pipeline_parallel_size > 1:
        raise ValueError(
            f"microbatches: oom_retry=True does not work with pipeline_parallel_size={config.pipeline_parallel_size},"
            " whose stages wait for each other within a step. Use oom_retry=False and a larger microbatches"
        )
    if config.tensor_parallel_size > 1 or (config.zero_stage == 3 and data_parallel_size > 1):
        raise ValueError(
            "microbatches: oom_retry=True does not work with zero_stage=3 over several ranks, nor with tensor"
            " parallelism, where ranks wait for each other within a step. Use zero_stage=2, or oom_retry=False and a"
            " larger microbatches"
        )


def _is_out_of_memory(error: RuntimeError) -> bool:
    """CUDA has an exception of its own; the CPU allocator and cuBLAS only have words."""
    words = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")
    return isinstance(error, torch.OutOfMemoryError) or any(word in str(error) for word in words)
