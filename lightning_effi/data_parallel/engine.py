"""What a run asks of data parallelism, and the engine of whole parameters, where there is nothing to do.

An engine owns the life of parameters and gradients between the hooks of Lightning: it runs the step hooks of the
module, reduces gradients, and leaves every parameter ready for the optimizer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
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


class Engine(ABC):
    """What happens to parameters and gradients between Lightning's hooks. Every engine answers every hook."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    @property
    @abstractmethod
    def is_sharded(self) -> bool:
        """Whether parameters are gathered for a step, in the dtype that they are computed with."""

    @abstractmethod
    def run_step(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a step hook of the module with its parameters ready for use."""

    @abstractmethod
    def accumulate(self) -> AbstractContextManager[None]:
        """Inside, a backward is not the last one of its accumulation window."""

    @abstractmethod
    def whole_window(self) -> AbstractContextManager[None]:
        """Inside, a backward is a window of its own, also within :meth:`accumulate`."""

    @abstractmethod
    def alone(self) -> AbstractContextManager[None]:
        """Inside, forward and backward of a step send nothing to other ranks once parameters are gathered."""

    @abstractmethod
    def before_backward(self, loss: Tensor) -> None:
        """Called right before autograd runs."""

    @abstractmethod
    def after_backward(self) -> None:
        """Called right after autograd ran; gradients of a closed window are reduced afterwards."""

    @abstractmethod
    def after_microbatch(self) -> None:
        """Called after each of several backwards of one step, after the last of which :meth:`after_backward` comes."""

    @abstractmethod
    def keep_unreduced(self, keep: bool) -> None:
        """While kept, ``zero_grad`` does not reach gradients that were not reduced yet."""

    @abstractmethod
    def before_optimizer_step(self) -> None:
        """Leave each parameter with the gradient that the optimizer should see."""

    @abstractmethod
    def after_optimizer_step(self) -> None:
        """Called when the optimizer has stepped; may be in the middle of a step hook (manual optimization)."""

    @abstractmethod
    def rest(self) -> None:
        """Free what is only needed while a step runs. Harmless when called twice."""

    @abstractmethod
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

    @abstractmethod
    def shard_of(self, parameter: Tensor) -> Tensor | None:
        """The sharded parameter that a full one stands for in the middle of a step; ``None`` for any other tensor."""

    @abstractmethod
    def watch(self, optimizer: Optimizer) -> None:
        """Let the engine know an optimizer whose parameters it manages."""

    @abstractmethod
    def release(self, optimizers: Sequence[Optimizer]) -> bool:
        """At the end of a run: make the module an ordinary one on the CPU again; all ranks must call this.

        Returns:
            ``False`` if it must stay as it is because the whole module does not fit into this machine's memory.
        """

    @abstractmethod
    def leave(self) -> None:
        """Take back what needs no other rank: hooks and shadowed methods. All that is left to do after a failure."""

    @abstractmethod
    def explain(self, exception: BaseException) -> None:
        """Add a note to ``exception`` where the engine knows more about its cause."""


class WholeEngine(Engine):
    """Parameters that are whole on this rank, and gradients that are nobody else's: there is nothing to do."""

    @property
    def is_sharded(self) -> bool:
        return False

    def run_step(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return step(*args, **kwargs)

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        yield

    @contextmanager
    def whole_window(self) -> Iterator[None]:
        yield

    @contextmanager
    def alone(self) -> Iterator[None]:
        yield

    def before_backward(self, loss: Tensor) -> None:
        pass

    def after_backward(self) -> None:
        pass

    def after_microbatch(self) -> None:
        pass

    def keep_unreduced(self, keep: bool) -> None:
        pass

    def before_optimizer_step(self) -> None:
        pass

    def after_optimizer_step(self) -> None:
        pass

    def rest(self) -> None:
        pass

    def sync_buffers(self) -> None:
        pass

    def shard_of(self, parameter: Tensor) -> Tensor | None:
        return None

    def watch(self, optimizer: Optimizer) -> None:
        pass

    def release(self, optimizers: Sequence[Optimizer]) -> bool:
        self.module.cpu()
        lightning_compat.optimizers_to_device(optimizers, torch.device("cpu"))
        return True

    def leave(self) -> None:
        pass

    def explain(self, exception: BaseException) -> None:
        pass
