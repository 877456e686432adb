"""Modules that the user's code compiles, where ``torch.compile`` cannot look into what a run has made of them."""

from __future__ import annotations

import sys
from contextlib import ExitStack

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import nn

from lightning_effi.compat import torch as torch_compat
from lightning_effi.modules.undo import Undo


def run_eagerly(module: nn.Module, undo: Undo, reason: str) -> bool:
    """Let what ``module`` compiles run without ``torch.compile``, also where backward recomputes it, and say so.

    Where nothing was compiled, the compiler's frontend need not even be imported.

    Args:
        module: the user's.
        undo: of the run.
        reason: what the run does to the module, for the message.

    Returns:
        whether anything can have been compiled.
    """
    if "torch._dynamo" not in sys.modules:
        return False
    eagerly = ExitStack()
    eagerly.enter_context(torch.compiler.set_stance("force_eager"))
    undo.push(eagerly.close, "torch.compiler.set_stance")
    compiled = [name or type(module).__name__ for name, m in module.named_modules() if torch_compat.is_compiled(m)]
    if compiled:
        more = f" and {len(compiled) - 1} more" if len(compiled) > 1 else ""
        rank_zero_info(f"{reason}: what the module compiles itself ({compiled[0]}{more}) runs without torch.compile")
    return True
