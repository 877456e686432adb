"""One view on what people call a linear layer: ``nn.Linear``, Hugging Face's ``Conv1D``, ``nn.MultiheadAttention``."""

from __future__ import annotations

from torch import nn


def is_linear(module: nn.Module) -> bool:
    """Whether this is a layer ``x @ weight (+ bias)`` that can be split. ``Conv1D`` is known by its name."""
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def out_dim(module: nn.Module) -> int:
    """The dim of ``weight`` along the outputs; ``Conv1D`` stores its weight transposed."""
    return 0 if isinstance(module, nn.Linear) else 1


def out_features(module: nn.Module) -> int:
    return int(module.weight.shape[out_dim(module)])  # type: ignore[union-attr, index]


def in_features(module: nn.Module) -> int:
    return int(module.weight.shape[1 - out_dim(module)])  # type: ignore[union-attr, index]


def linears(root: nn.Module) -> dict[str, nn.Module]:
    """The linear layers of ``root`` by name, sorted; those inside ``nn.MultiheadAttention`` belong to it."""
    inside = {id(child) for module in root.modules() if isinstance(module, nn.MultiheadAttention)
              for child in module.modules()}  # fmt: skip
    return {name: m for name, m in sorted(root.named_modules()) if name and is_linear(m) and id(m) not in inside}


def attentions(root: nn.Module) -> dict[str, nn.MultiheadAttention]:
    """The ``nn.MultiheadAttention`` modules of ``root`` by name."""
    return {name: m for name, m in sorted(root.named_modules()) if isinstance(m, nn.MultiheadAttention)}
