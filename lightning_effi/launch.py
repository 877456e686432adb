"""How the processes of one node are started."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from lightning_effi.compat import lightning as lightning_compat

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from lightning_effi.config import StartMethod
    from lightning_effi.mesh import MeshStrategy


_GRACE_SECONDS = 5.0


def make_launcher(strategy: MeshStrategy, start_method: StartMethod) -> Any:
    """The launcher for ``start_method``; ``None`` for one process, which needs none.

    Under torchrun or SLURM the processes are there already, and Lightning's popen launcher only sets threads.
    """
    assert strategy.cluster_environment is not None
    external = strategy.cluster_environment.creates_processes_externally
    if strategy.num_processes * strategy.num_nodes == 1 and not external:
        return None
    if start_method == "auto":
        start_method = "fork" if lightning_compat.is_interactive() and not external else "popen"
    if start_method == "popen" or external:
        return lightning_compat.popen_launcher(strategy.cluster_environment, strategy.num_processes, strategy.num_nodes)
    return _FullWeightsLauncher(strategy, start_method=start_method)


def end_other_processes(launcher: Any) -> None:
    """After an error in this process: end those that it started, which would wait for it in a collective.

    They get a moment first, since the error may have come from one of them, and its traceback is the one to show.
    """
    deadline = time.monotonic() + _GRACE_SECONDS
    for process in getattr(launcher, "procs", ()):
        if isinstance(process, subprocess.Popen):
            try:
                process.wait(timeout=max(deadline - time.monotonic(), 0))
            except subprocess.TimeoutExpired:
                process.kill()


class _FullWeightsLauncher(lightning_compat.MultiProcessingLauncher):
    """fork and spawn hand the weights back to the main process: gather them there, under their own names.

    An error goes back as text, and no hook of the strategy sees it in the process where it is raised.
    """

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        return super().launch(partial(_explaining, self._strategy, function), *args, trainer=trainer, **kwargs)

    @override
    def _collect_rank_zero_results(self, trainer: pl.Trainer, results: Any) -> Any:
        module = trainer.lightning_module  # all ranks come here, so gathering is allowed
        state = trainer.strategy.lightning_module_state_dict()
        module.__dict__["state_dict"] = lambda *args, **kwargs: state
        try:
            return super()._collect_rank_zero_results(trainer, results)
        finally:
            del module.__dict__["state_dict"]


def _explaining(strategy: Any, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    try:
        return function(*args, **kwargs)
    except BaseException as error:
        strategy.explain(error)
        raise
