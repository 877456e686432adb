"""What a job may change in its process and what it must not, where other jobs run in the same process after it."""

from __future__ import annotations

import logging
import os
import random
import signal
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.tensor
import torch.utils.data


@dataclass(frozen=True)
class Remains:
    """State of the process before its first job.

    Attributes:
        environment: Environment variables. Lightning's ``seed_everything`` leaves some.
        generators: States of the global random generators, in the order torch, numpy, python.
        promised: What a run under a strategy leaves as it found it.
        namespaces: What the package's modules and their classes hold, and classes of torch; tests replace some of it.
    """

    environment: dict[str, str]
    generators: tuple[torch.Tensor, Any, Any]
    promised: dict[str, Any]
    namespaces: dict[Any, dict[str, Any]]

    @classmethod
    def now(cls) -> Remains:
        return cls(
            dict(os.environ),
            (torch.get_rng_state(), np.random.get_state(), random.getstate()),
            _promised(),
            {owner: _callables(owner) for owner in _owners()},
        )

    def put_back(self) -> None:
        """Undo what jobs may do: seed generators, set environment variables, keep the process group they were given.

        To be called before the next job rather than after the last one: by then all ranks have left their collectives.
        """
        if dist.is_initialized():
            dist.destroy_process_group()
        os.environ.clear()
        os.environ.update(self.environment)
        of_torch, of_numpy, of_python = self.generators
        torch.set_rng_state(of_torch)
        np.random.set_state(of_numpy)
        random.setstate(of_python)

    def assert_nothing_left(self) -> None:
        """
        Raises:
            AssertionError: Something else was changed and not put back.
        """
        left = _promised()
        changed = [f"{what} ({left[what]!r}, was {was!r})" for what, was in self.promised.items() if left[what] != was]
        for owner, names in self.namespaces.items():
            changed += [
                f"{owner.__name__}.{name}" for name, value in names.items() if vars(owner).get(name) is not value
            ]
        assert not changed, f"the job left changes in its process, so it needs a fresh one: {'; '.join(changed)}"


def _promised() -> dict[str, Any]:
    return {
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "gradients": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "anomaly detection": torch.is_anomaly_enabled(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "threads": torch.get_num_threads(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "signal handlers": {
            which: signal.getsignal(which) for which in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
        },
        "level of the logger": logging.getLogger("lightning_effi").level,
    }


_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


def _owners() -> list[Any]:
    modules = [module for name, module in sys.modules.items() if name.partition(".")[0] == "lightning_effi"]
    classes = [cls for module in modules for cls in vars(module).values() if isinstance(cls, type)]
    return [*modules, *dict.fromkeys(cls for cls in classes if cls.__module__.startswith("lightning_effi")), *_CLASSES]


def _callables(owner: Any) -> dict[str, Any]:
    """What a test may have replaced; numbers and tables are what runs keep for the next one."""
    return {name: value for name, value in vars(owner).items() if callable(value) or isinstance(value, classmethod)}


_CLASSES = (
    torch.nn.Module,
    torch.Tensor,
    torch.optim.Optimizer,
    torch.utils.data.DataLoader,
    torch.nn.parallel.DistributedDataParallel,
    torch.distributed.tensor.DTensor,
)
