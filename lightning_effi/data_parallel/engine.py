"""What the strategy asks of data parallelism, and the engine for one process, where there is nothing to do.

An engine owns the life of parameters and gradients between the hooks of Lightning: it runs the step hooks of the
module, reduces gradients, and leaves every parameter ready for the optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_effi.compat import dtensor as dtensor_compat
from lightning_effi.compat import lightning as lightning_compat


class StepRoot(nn.Module):
    """Runs a bound method of its child as its own ``forward``.

    Lightning calls ``training_step`` and its siblings directly, so hooks on the LightningModule's ``forward`` never
    fire. Wrapping the module, instead of redirecting its ``forward``, leaves its class and its ``self(x)`` alone.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return step(*args, **kwargs)


class Engine:
    """One process: every hook does nothing. The other engines override what they need."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._keeps_unreduced = False

    def run_step(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a step hook of the module with its parameters ready for use."""
        return step(*args, **kwargs)

    @property
    def is_sharded(self) -> bool:
        """Whether parameters are gathered for a step, in the dtype that they are computed with."""
        return False

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Inside, a backward is not the last one of its accumulation window."""
        yield

    @contextmanager
    def whole_window(self) -> Iterator[None]:
        """Inside, a backward is a window of its own, also within :meth:`accumulate`."""
        yield

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Inside, forward and backward of a step send nothing to other ranks once parameters are gathered."""
        yield

    def before_backward(self, loss: Tensor) -> None:
        """Called right before autograd runs."""

    def after_backward(self) -> None:
        """Called right after autograd ran; gradients of a closed window are reduced afterwards."""

    def after_microbatch(self) -> None:
        """Called after each of several backwards of one step, after the last of which :meth:`after_backward` comes."""

    def keep_unreduced(self, keep: bool) -> None:
        """While kept, ``zero_grad`` does not reach gradients that were not reduced yet."""
        self._keeps_unreduced = keep

    def before_optimizer_step(self) -> None:
        """Leave each parameter with the gradient that the optimizer should see."""

    def after_optimizer_step(self) -> None:
        """Called when the optimizer has stepped; may be in the middle of a step hook (manual optimization)."""

    def rest(self) -> None:
        """Free what is only needed while a step runs. Harmless when called twice."""

    def sync_buffers(self) -> None:
        """Give all data-parallel ranks the buffers of the first one."""

    def discard(self) -> None:
        """Forget all gradients, those that were not reduced yet too."""
        for parameter in self.module.parameters():
            parameter.grad = None

    @torch.no_grad()
    def scale_gradients(self, factor: float) -> None:
        """Multiply all gradients that wait for an optimizer's step, in place."""
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                dtensor_compat.local_tensor(parameter.grad).mul_(factor)

    def shard_of(self, parameter: Tensor) -> Tensor | None:
        """The sharded parameter that a full one stands for in the middle of a step; ``None`` for any other tensor."""
        return None

    def watch(self, optimizer: Optimizer) -> None:
        """Let the engine know an optimizer whose parameters it manages."""

    def release(self, optimizers: Sequence[Optimizer]) -> bool:
        """At the end of a run: make the module an ordinary one on the CPU again.

        Returns:
            ``False`` if it must stay as it is because the whole module does not fit into this machine's memory.
        """
        self.module.cpu()
        lightning_compat.optimizers_to_device(optimizers, torch.device("cpu"))
        return True

    def leave(self) -> None:
        """Take back what needs no other rank: hooks and shadowed methods. All that is left to do after a failure."""

    def explain(self, exception: BaseException) -> None:
        """Add a note to ``exception`` where the engine knows more about its cause."""
