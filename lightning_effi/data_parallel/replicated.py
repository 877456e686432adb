"""ZeRO stage 0: full copies whose gradients DistributedDataParallel averages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.parallel import DistributedDataParallel

from lightning_effi.comm.agreement import Agreement
from lightning_effi.comm.broadcast import broadcast_states
from lightning_effi.compat import torch as torch_compat
from lightning_effi.data_parallel.averaging import average_gradients
from lightning_effi.data_parallel.engine import StepRoot, WholeEngine
from lightning_effi.modules.deferred import DeferredValues


class ReplicatedEngine(WholeEngine):
    """Runs a module in DistributedDataParallel.

    Unused parameters are looked for in every step, since a module that nobody prepared may have some. DDP is built anew
    for parameters that are frozen or unfrozen later, because its reducer only knows those that were trainable when it
    was made, and for those whose gradients autograd accumulates in another node than the one that it hooked, which
    ``Tensor.set_`` brings about (``register_parametrization`` calls it).

    A step with reentrant checkpoints, whose parts the search cannot see, is reduced without DDP, after its backward.

    Args:
        module: the LightningModule; moved to ``device`` in place.
        group: the ranks that average gradients.
        control_group: the same ranks, with a backend for CPU tensors.
        device: where the module lives.
        sync_every_backward: average gradients in each backward of an accumulation window, or only in the last.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        group: dist.ProcessGroup,
        control_group: dist.ProcessGroup,
        device: torch.device,
        sync_every_backward: bool,
    ) -> None:
        super().__init__(module)
        self._group = group
        self._agreement = Agreement(control_group)
        self._has_reentrant = False  # whether the step of this rank made a reentrant checkpoint
        self._averages = False  # whether the gradients of the coming backward are averaged when it is over
        self._device = device
        self._sync_every_backward = sync_every_backward
        self._alone = False
        DeferredValues(module).fill_through(module)
        module.to(device)
        self.sync_states()
        self._root = StepRoot(module)
        if device.type == "cpu":
            # DDP warns whenever its search finds every parameter used. One that never is keeps it quiet; on CUDA it
            # would make the host wait for the device at the end of each backward, which is worse than a warning.
            self._root.register_parameter("never_used", nn.Parameter(torch.zeros(1)))
        self._parameters = list(module.parameters())
        self._ddp: DistributedDataParallel | None = None
        self._hooked: list[Any] = []

    def sync_states(self) -> None:
        """Overwrite parameters and buffers with the first rank's."""
        broadcast_states([*self.module.parameters(), *self.module.buffers()], self._group)

    def run_step(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._alone or not torch.is_grad_enabled():
            return step(*args, **kwargs)
        ddp = self._current_ddp()
        if ddp is None:
            return step(*args, **kwargs)
        run = self._run_automatic if getattr(self.module, "automatic_optimization", True) else self._run_manual
        self._has_reentrant = self._averages = False
        with torch_compat.reentrant_checkpoints(self._note_reentrant):
            return run(ddp, step, *args, **kwargs)

    def _run_automatic(self, ddp: DistributedDataParallel, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """DDP arms its reducer when this forward ends, unless it sees that nothing is to be sent."""
        syncs = ddp.require_backward_grad_sync

        def run(*args: Any, **kwargs: Any) -> Any:
            output = step(*args, **kwargs)
            if syncs:
                self._averages = self._agreement.any([self._has_reentrant])[0]
                ddp.require_backward_grad_sync = not self._averages
            return output

        try:
            return ddp(run, *args, **kwargs)
        finally:
            ddp.require_backward_grad_sync = syncs
            ddp.require_forward_param_sync = ddp.require_forward_param_sync or self._averages

    @staticmethod
    def _run_manual(ddp: DistributedDataParallel, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Manual optimization runs backward inside the step: :meth:`before_backward` arms the reducer there, so DDP
        must not arm it again when this forward ends.
        """

        def run(*args: Any, **kwargs: Any) -> Any:
            output = step(*args, **kwargs)
            ddp.require_backward_grad_sync = False
            return output

        try:
            return ddp(run, *args, **kwargs)
        finally:
            ddp.require_backward_grad_sync = True

    def _note_reentrant(self) -> None:
        self._has_reentrant = True

    def _current_ddp(self) -> DistributedDataParallel | None:
        nodes = [get_gradient_edge(p).node if p.requires_grad else None for p in self._parameters]
        if len(nodes) != len(self._hooked) or any(a is not b for a, b in zip(nodes, self._hooked, strict=True)):
            self._hooked = nodes
            self._ddp = self._build() if any(node is not None for node in nodes) else None
        return self._ddp

    def _build(self) -> DistributedDataParallel:
        on_cuda = self._device.type == "cuda"
        # DDP asks to be built in a side stream when it will be captured in a CUDA graph
        with torch.cuda.stream(torch.cuda.Stream()) if on_cuda else nullcontext():
            for buffer in self.module.buffers():  # DDP sends a single one as it lies in memory, which torch refuses
                buffer.data = buffer.detach().reshape(-1).view(buffer.shape)
            return DistributedDataParallel(
                self._root,
                device_ids=[self._device.index] if on_cuda else None,
                process_group=self._group,
                find_unused_parameters=True,
                gradient_as_bucket_view=True,
            )

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        ddp = self._current_ddp()
        if ddp is None or self._sync_every_backward:
            yield
        else:
            with ddp.no_sync():
                yield

    @contextmanager
    def alone(self) -> Iterator[None]:
        self._alone = True
        try:
            yield
        finally:
            self._alone = False

    @contextmanager
    def whole_window(self) -> Iterator[None]:
        ddp = self._current_ddp()
        syncs = ddp is None or ddp.require_backward_grad_sync
        if ddp is not None:
            ddp.require_backward_grad_sync = True
        try:
            yield
        finally:
            if ddp is not None:
                ddp.require_backward_grad_sync = syncs

    def before_backward(self, loss: Tensor) -> None:
        ddp = self._ddp
        if ddp is None or getattr(self.module, "automatic_optimization", True):
            return
        self._averages = ddp.require_backward_grad_sync and self._agreement.any([self._has_reentrant])[0]
        if self._averages:
            ddp.require_forward_param_sync = True
        else:
            torch_compat.ddp_prepare_for_backward(ddp, loss)

    def after_backward(self) -> None:
        if self._averages:
            self._averages = False
            average_gradients(self.module, self._group, self._agreement)

    def sync_buffers(self) -> None:
        broadcast_states(self.module.buffers(), self._group)
