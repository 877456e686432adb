"""What a model says itself about its tensor parallelism: ``base_model_tp_plan`` of transformers' configurations.

The plan that is derived from a run of the blocks is finer (it keeps packed projections split where transformers gathers
them), so theirs is only asked about layers that would stay whole, and is probed like any other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from lightning_effi.tensor_parallel.layers.linear import linears
from lightning_effi.tensor_parallel.planning.plan import asked_styles

# Their names of styles, with ours. The input of a row-wise layer is cut wherever it arrives whole; tables are split by
# rows of their own accord, and gradients of replicated weights come out whole by construction.
_STYLES = {
    "colwise": "column",
    "packed_colwise": "column",
    "colwise_gather_output": "column_gather",
    "rowwise": "row",
    "rowwise_split_input": "row",
    "embedding_rowwise": "replicate",
    "replicated_with_grad_allreduce": "replicate",
}


@dataclass(frozen=True)
class Hints:
    """Styles by patterns over full module names, and what could not be read of them."""

    styles: Mapping[str, str]
    unknown: tuple[str, ...] = ()

    def inside(self, prefix: str, block: nn.Module) -> dict[str, str]:
        """The styles of the linear layers of ``block``, which is called ``prefix``, by their names in it."""
        names = {f"{prefix}.{name}": layer for name, layer in linears(block).items()}
        return {name.removeprefix(f"{prefix}."): style for name, style in asked_styles(names, self.styles).items()}


def read_hints(module: nn.Module) -> Hints:
    """The plans of all transformers models inside ``module``; empty where there are none."""
    styles: dict[str, str] = {}
    unknown: list[str] = []
    for name, child in module.named_modules():
        plan: Any = getattr(getattr(child, "config", None), "base_model_tp_plan", None)
        if not isinstance(plan, Mapping) or getattr(child, "base_model", None) is not child:
            continue  # models around it share the configuration
        for pattern, theirs in plan.items():
            full = f"{name}.{pattern}" if name else pattern
            if theirs in _STYLES:
                styles[full] = _STYLES[theirs]
            else:
                unknown.append(f"{full}: base_model_tp_plan asks for '{theirs}', which has no counterpart here")
    return Hints(styles, tuple(unknown))
