"""Private names of Lightning, each behind a function of our own."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.strategies.launchers.multiprocessing import _MultiProcessingLauncher as MultiProcessingLauncher
from torch import Tensor, nn

from lightning_effi.compat.torch import group_named

__all__ = ["MultiProcessingLauncher"]  # starts processes by fork or spawn and brings rank 0's results back

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from datetime import timedelta

    import lightning.pytorch as pl
    from lightning.fabric.plugins.environments import ClusterEnvironment
    from lightning.pytorch.strategies.launchers.launcher import _Launcher


def init_process_group(environment: ClusterEnvironment, backend: str, timeout: timedelta, device_id: Any) -> None:
    """Lightning's way to start the default group; returns at once where one exists."""
    from lightning.fabric.utilities.distributed import _init_dist_connection

    if environment.world_size() > 1 or torch.distributed.is_initialized():
        _init_dist_connection(environment, backend, timeout=timeout, device_id=device_id)
    else:  # without an address, which later processes would inherit
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group(
            backend, store=store, rank=0, world_size=1, timeout=timeout, device_id=device_id
        )


def default_backend(device: torch.device) -> str:
    """``nccl`` for CUDA, ``gloo`` for CPU."""
    from lightning.fabric.utilities.distributed import _get_default_process_group_backend_for_device

    return _get_default_process_group_backend_for_device(device)


def reset_seed() -> None:
    """Repeat ``seed_everything`` in a process that Lightning launched."""
    from lightning.fabric.utilities.seed import reset_seed as lightning_reset_seed

    lightning_reset_seed()


def is_seeded() -> bool:
    """Whether this process was seeded as ``seed_everything`` asked for; a spawned process was not."""
    import os

    return os.environ.get("PL_GLOBAL_SEED") in (None, str(torch.initial_seed()))


def set_rank_zero(rank: int) -> None:
    """Tell Lightning's two ``rank_zero_only`` decorators which rank this process has."""
    from lightning.fabric.utilities.rank_zero import rank_zero_only as fabric_rank_zero_only
    from lightning_utilities.core.rank_zero import rank_zero_only as utilities_rank_zero_only

    fabric_rank_zero_only.rank = utilities_rank_zero_only.rank = rank  # type: ignore[attr-defined]


def sync_reduce(tensor: Tensor, group: Any, reduce_op: Any) -> Tensor:
    """Lightning's all-reduce for logged values (mean, sum, min, max ...)."""
    from lightning.fabric.utilities.distributed import _sync_ddp_if_available

    return _sync_ddp_if_available(tensor, group, reduce_op=reduce_op)


def all_gather_batch(tensor: Tensor, group: Any, sync_grads: bool) -> Tensor:
    """Lightning's ``self.all_gather``: ``[group size, *tensor.shape]``."""
    from lightning.fabric.utilities.distributed import _all_gather_ddp_if_available

    return _all_gather_ddp_if_available(tensor, group=group, sync_grads=sync_grads)


def popen_launcher(environment: ClusterEnvironment, processes: int, nodes: int) -> _Launcher:
    """The launcher that starts the script again for each local rank."""
    from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher

    return _SubprocessScriptLauncher(environment, processes, nodes)


def is_interactive() -> bool:
    """Whether this is a notebook or a Python prompt."""
    from lightning.fabric.utilities.imports import _IS_INTERACTIVE

    return _IS_INTERACTIVE


def optimizers_to_device(optimizers: Iterable[Any], device: torch.device) -> None:
    """Move optimizer states that were made on another device."""
    from lightning.fabric.utilities.optimizer import _optimizers_to_device

    _optimizers_to_device(optimizers, device)


def unwrap_lightning_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """The torch optimizer inside Lightning's wrapper."""
    return getattr(optimizer, "_optimizer", optimizer)


def metrics_in_group(module: nn.Module, group: Any) -> None:
    """Let torchmetrics' metrics add up over ``group`` only, where the user has not chosen otherwise.

    They would take all ranks and count those that work on the same batch several times. Their own ``process_group``
    would do, but it cannot be copied with the module, as moving averages do.
    """
    for metric in module.modules():
        if hasattr(metric, "dist_sync_fn") and metric.dist_sync_fn is None and metric.process_group is None:
            metric.dist_sync_fn = _GatherInGroup(group)


def metrics_everywhere(module: nn.Module) -> None:
    """Undo :func:`metrics_in_group`."""
    for metric in module.modules():
        if isinstance(getattr(metric, "dist_sync_fn", None), _GatherInGroup):
            metric.dist_sync_fn = None  # type: ignore[assignment]


class _GatherInGroup:
    def __init__(self, group: Any) -> None:
        self._name = group.group_name  # a copy of the metric may outlive the run, and the group

    def __deepcopy__(self, memo: Any) -> _GatherInGroup:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # a metric in a checkpoint belongs to no run

    def __call__(self, value: Tensor, group: Any = None) -> list[Tensor]:
        from torchmetrics.utilities.distributed import gather_all_tensors

        return gather_all_tensors(value, group_named(self._name))


def synced_log_keys(trainer: pl.Trainer) -> list[str]:
    """Names of the plain values that the running loop is to reduce over the ranks (``sync_dist``), in that order.

    Values with ``rank_zero_only`` are logged by one rank and reduced by none.
    """
    results: dict[str, Any] = trainer._results or {}
    tensors = {key: result.meta.sync for key, result in results.items() if result.is_tensor}
    return [key for key, sync in tensors.items() if sync.should and not sync.rank_zero_only]


_serving_compiled: weakref.WeakSet[Any] = weakref.WeakSet()


def allow_compiled_modules(strategy: Any) -> None:
    """Let ``trainer.fit(torch.compile(module))`` through for ``strategy``, as long as it lives.

    Lightning asks ``_verify_strategy_supports_compile``, which knows three of its own classes by name, before any hook
    of the strategy. The function is wrapped where the Trainer looks it up, every other strategy is still judged by
    Lightning, and with the last strategy that was allowed the wrapper is gone.
    """
    from lightning.pytorch.trainer import trainer as trainer_module

    if strategy in _serving_compiled:
        return
    if not _serving_compiled:
        original = trainer_module._verify_strategy_supports_compile

        def verify(model: Any, strategy: Any) -> None:
            if strategy not in _serving_compiled:
                original(model, strategy)

        verify.original = original  # type: ignore[attr-defined]
        trainer_module._verify_strategy_supports_compile = verify
    _serving_compiled.add(strategy)
    weakref.finalize(strategy, _end_allowing_compiled_modules).atexit = False


def _end_allowing_compiled_modules() -> None:
    from lightning.pytorch.trainer import trainer as trainer_module

    current = trainer_module._verify_strategy_supports_compile
    if not list(_serving_compiled) and hasattr(current, "original"):
        trainer_module._verify_strategy_supports_compile = current.original


def around_zero_grad(trainer: pl.Trainer, context: Callable[[], AbstractContextManager[Any]]) -> Callable[[], None]:
    """Run the hooks between ``training_step`` and ``backward`` within ``context()``; returns how to undo it.

    These are ``on_before_zero_grad`` and ``optimizer_zero_grad``, with automatic optimization; no strategy hook
    surrounds them. The methods that call them are shadowed on the loop of this trainer alone.
    """
    loop: Any = trainer.fit_loop.epoch_loop.automatic_optimization
    names = ("_on_before_zero_grad", "_optimizer_zero_grad")

    def within(method: Callable[..., None], *args: Any) -> None:
        with context():
            method(*args)

    for name in names:
        setattr(loop, name, partial(within, getattr(loop, name)))

    def undo() -> None:
        for name in names:
            loop.__dict__.pop(name, None)

    return undo


def registered_signal_handler(signum: int) -> list[Any] | None:
    """What Lightning registered for a signal (``_HandlersCompose``); ``None`` if the handler is somebody else's."""
    import signal

    from lightning.pytorch.trainer.connectors.signal_connector import _HandlersCompose

    handler = signal.getsignal(signum)
    return list(handler.signal_handlers) if isinstance(handler, _HandlersCompose) else None


def is_sigterm_notifier(handler: Any) -> bool:
    """Whether this is Lightning's SIGTERM handler, which broadcasts from inside the handler."""
    from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector

    return getattr(handler, "__func__", None) is _SignalConnector._sigterm_notifier_fn


def mark_sigterm(trainer: pl.Trainer) -> None:
    """Set the flag that the loops look at after each batch."""
    trainer._signal_connector.received_sigterm = True


def before_training_batches(trainer: pl.Trainer, call: Callable[[], None]) -> Callable[[], None]:
    """Call ``call`` on all ranks before each batch of training; returns how to undo it.

    It takes the place of ``_TrainingEpochLoop._broadcast_sigterm_tensor``, by which ranks learn that rank zero was sent
    SIGTERM, and of which only they know. The method is shadowed on the loop of this trainer alone.
    """
    loop: Any = trainer.fit_loop.epoch_loop
    loop._broadcast_sigterm_tensor = call
    return lambda: loop.__dict__.pop("_broadcast_sigterm_tensor", None)


def slurm_requeue_signal(trainer: pl.Trainer) -> int | None:
    """The signal by which SLURM announces a requeue; ``None`` outside SLURM or without auto-requeue."""
    from lightning.fabric.plugins.environments import SLURMEnvironment

    environment = trainer._accelerator_connector.cluster_environment
    if isinstance(environment, SLURMEnvironment) and environment.auto_requeue:
        return environment.requeue_signal
    return None


def hold_back_schedulers(trainer: pl.Trainer, is_held: Callable[[], bool]) -> Callable[[], None]:
    """Let step-interval schedulers stand still while ``is_held()``; returns a function that undoes it.

    Lightning moves them at the end of each window (``_TrainingEpochLoop.update_lr_schedulers``) whether or not the
    optimizer took its step. The method is shadowed on the loop of this trainer alone.
    """
    loop = trainer.fit_loop.epoch_loop
    original = loop.update_lr_schedulers

    def update_lr_schedulers(interval: str, update_plateau_schedulers: bool) -> None:
        if interval != "step" or not is_held():
            original(interval, update_plateau_schedulers=update_plateau_schedulers)

    loop.update_lr_schedulers = update_lr_schedulers  # type: ignore[method-assign]
    return lambda: loop.__dict__.pop("update_lr_schedulers", None)


def precision_flag(trainer: pl.Trainer) -> str:
    """The value of ``Trainer(precision=...)``; ``"32-true"`` where it was not given."""
    return trainer._accelerator_connector._precision_flag


_TRAINERS = {"lightning_effi": "lightning.pytorch", "lightning_effi.pytorch_lightning": "pytorch_lightning"}


def belonging(name: str) -> str:
    """To which of Lightning's two package names ``name`` belongs: what a Trainer of the other shows, and refuses."""
    package = __name__.removesuffix(".compat.lightning")
    [other] = _TRAINERS.keys() - {package}
    return f"<{name} of {package}, for {_TRAINERS[package]}.Trainer; {other} has it for {_TRAINERS[other]}.Trainer>"
