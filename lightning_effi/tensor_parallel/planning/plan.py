"""The tensor-parallel plan: which layer is split how, why, and what stays whole. A value that prints itself."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

STYLES = ("column", "row", "column_gather", "column_packed:k", "column_packed:a,b,...", "vocab", "replicate")


@dataclass(frozen=True)
class LayerPlan:
    """How one layer is split.

    Attributes:
        name: dotted name of the module; empty for a block that is such a layer itself.
        style: ``column`` (outputs are split), ``row`` (inputs are split, outputs summed), ``column_gather`` (outputs
            are split and gathered), ``attention`` (``nn.MultiheadAttention``: heads) or ``vocab`` (rows of an
            embedding, outputs of a head; their number need not be divisible).
        pieces: sizes of the pieces that make up the outputs; more than one for packed projections.
        why: what the decision follows from.
    """

    name: str
    style: str
    pieces: tuple[int, ...] = ()
    why: str = ""

    def below(self, prefix: str) -> LayerPlan:
        """The same plan under the name that the layer has in a larger module."""
        name = ".".join(part for part in (prefix, self.name) if part)
        return LayerPlan(name, self.style, self.pieces, self.why)

    def __str__(self) -> str:
        style = self.style
        if len(self.pieces) > 1:
            equal = len(set(self.pieces)) == 1
            style += f"_packed:{len(self.pieces) if equal else ','.join(map(str, self.pieces))}"
        return f"{style} ({self.why})" if self.why else style


@dataclass(frozen=True)
class SequencePlan:
    """A block whose residual stream is held in parts.

    Attributes:
        name: dotted name of the block.
        dim: the dim of its hidden states that is split; the sequence, whichever order the module keeps.
        gathers: whether what it returns is made whole; blocks that hand it to the next one leave it split.
    """

    name: str
    dim: int
    gathers: bool = True


@dataclass(frozen=True)
class TensorPlan:
    """What tensor parallelism does with a module. ``print(plan)`` shows it.

    Attributes:
        size: ranks in one group.
        layers: the layers that are split.
        sequence: the blocks between whose layers activations are split by sequence.
        handing_out: the blocks that return activations of split layers beside their hidden states.
        replicated: what stays whole on every rank, with the reason.
        total: number of parameters of the module.
        per_rank: number of parameters that a rank holds of it, at most.
        whole: number of parameters that every rank holds.
    """

    size: int
    layers: tuple[LayerPlan, ...] = ()
    sequence: tuple[SequencePlan, ...] = ()
    handing_out: tuple[str, ...] = ()
    replicated: tuple[str, ...] = ()
    total: int = 0
    per_rank: int = 0
    whole: int = 0

    def __str__(self) -> str:
        lines = [
            f"tensor parallelism over {self.size} ranks: {self.per_rank:,} of {self.total:,} parameters per rank,"
            f" {self.whole:,} of them on every rank"
        ]
        alike: dict[tuple[str, str], list[str]] = {}
        for layer in self.layers:
            alike.setdefault((stars(layer.name), str(layer)), []).append(layer.name)
        for block in self.sequence:
            what = f"norms, dropouts and residual stream in parts of dim {block.dim}"
            alike.setdefault((stars(block.name), what), []).append(block.name)
        lines += [f"  {pattern}: {what} x {len(names)}" for (pattern, what), names in alike.items()]
        lines += [f"  stays whole: {text}" for text in self.replicated]
        return "\n".join(lines)


def stars(name: str) -> str:
    """A module's name with ``*`` for each number."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def parse_style(style: str, width: int) -> tuple[str, tuple[int, ...]]:
    """A user's style as (style, pieces) for a layer with ``width`` outputs.

    Raises:
        ValueError: for packed sizes that do not add up.
    """
    kind, _, sizes = style.partition(":")
    if kind != "column_packed":
        return kind, (width,)
    pieces = tuple(int(size) for size in sizes.split(","))
    if len(pieces) == 1:
        pieces = (width // pieces[0],) * pieces[0]
    if sum(pieces) != width:
        raise ValueError(f"the pieces {sizes} of {style!r} do not make up the {width} outputs")
    return "column", pieces


def asked_styles(names: Mapping[str, nn.Module], plan: Mapping[str, str]) -> dict[str, str]:
    """The style that a user's patterns give to each of ``names``; the last pattern that fits holds."""
    return {name: style for pattern, style in plan.items() for name in names if fnmatch.fnmatchcase(name, pattern)}
