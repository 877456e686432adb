"""What a job may change in its process and what it must not, where other jobs run in the same process after it."""

from __future__ import annotations

import logging
import os
import random
import signal
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Remains:
    """State of the process before its first job.

    Attributes:
        environment: Environment variables. Lightning's ``seed_everything`` leaves some.
        generators: States of the global random generators, in the order torch, numpy, python.
        promised: What a run under a strategy leaves as it found it.
    """

    environment: dict[str, str]
    generators: tuple[torch.Tensor, Any, Any]
    promised: dict[str, Any]

    @classmethod
    def now(cls) -> Remains:
        return cls(
            dict(os.environ),
            (torch.get_rng_state(), np.random.get_state(), random.getstate()),
            _promised(),
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
        changed = [f"{what}: {left[what]!r}, was {was!r}" for what, was in self.promised.items() if left[what] != was]
        assert not changed, f"the job left behind in its process: {'; '.join(changed)}"


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
        "classes": {cls: (cls.__dict__.get("__torch_function__"), cls.__init__) for cls in _CLASSES},
    }


_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
_CLASSES = (torch.nn.Module, torch.Tensor, torch.nn.Parameter, torch.optim.Optimizer, torch.utils.data.DataLoader)
