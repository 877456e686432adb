"""From a trace to groups of layers that can be split together.

A group is a set of column-wise layers and the row-wise layers that they feed; it is what stays whole if it fails its
probe. No process group is needed here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace

from torch import nn

from lightning_effi.tensor_parallel.layers.linear import attentions, in_features, linears, out_features
from lightning_effi.tensor_parallel.planning.plan import LayerPlan, asked_styles, parse_style
from lightning_effi.tensor_parallel.planning.trace import INPUT, Trace


@dataclass(frozen=True)
class LayerGroup:
    """Layers of one block that are split together or not at all; names are relative to the block."""

    layers: tuple[LayerPlan, ...]

    @property
    def name(self) -> str:
        """For messages: the layers in short."""
        return ", ".join(layer.name or "the block itself" for layer in self.layers)

    def without(self, names: frozenset[str]) -> LayerGroup | None:
        """The group if these layers stay whole; ``None`` where no column-wise one is left."""
        kept = tuple(layer for layer in self.layers if layer.name not in names)
        return LayerGroup(kept) if any(layer.style != "row" for layer in kept) else None

    def unpacked(self, names: Set[str]) -> LayerGroup:
        """The group if these layers' outputs are one piece each."""
        return LayerGroup(
            tuple(
                replace(layer, pieces=(sum(layer.pieces),)) if layer.name in names else layer for layer in self.layers
            )
        )


def decide(
    block: nn.Module, trace: Trace, size: int, hints: Mapping[str, str] | None = None
) -> tuple[list[LayerGroup], list[str]]:
    """The groups of ``block``, and what stays whole with the reason.

    Args:
        block: whose linear layers are looked at.
        trace: a run of it.
        size: number of ranks.
        hints: styles, by name, for layers that would stay whole.
    """
    layers = linears(block)
    blocked = frozenset({INPUT})
    while True:
        rows, columns = _assign(trace, layers, blocked)
        # attention weights, say, may be handed out in parts; hidden states, which anything else has a share in, may not
        found = blocked.union(*(leaf for leaf in trace.outputs if not leaf <= columns))
        if found == blocked:
            break
        blocked = found
    groups: list[LayerGroup] = []
    whole: list[str] = []
    for members in _connected(rows):
        candidate, reason = _group(members, rows, trace, layers, size)
        if candidate is None:
            whole.append(f"{', '.join(sorted(members))}: {reason}")
        else:
            groups.append(candidate)
    for name, attention in attentions(block).items():
        if not attention._qkv_same_embed_dim:
            whole.append(f"{name or 'the block itself'}: keys or values have another width than queries")
        elif attention.num_heads % size:
            whole.append(f"{name or 'the block itself'}: {attention.num_heads} heads are not divisible by {size}")
        else:
            pieces = (attention.embed_dim,) * 3
            groups.append(LayerGroup((LayerPlan(name, "attention", pieces, "heads of nn.MultiheadAttention"),)))
    left = [name for name in layers if name not in rows and name not in columns]
    hinted = _hinted({name: layers[name] for name in left}, trace, size, hints or {})
    if hinted:
        groups.append(LayerGroup(hinted))
        left = [name for name in left if name not in {layer.name for layer in hinted}]
    if unused := [name for name in left if name not in trace.inputs]:
        whole.append(f"{', '.join(unused)}: not called as layers in the first step")
    if left := [name for name in left if name not in unused]:
        whole.append(f"{', '.join(left)}: not between two linear layers")
    return groups, whole


def _hinted(
    layers: Mapping[str, nn.Module], trace: Trace, size: int, hints: Mapping[str, str]
) -> tuple[LayerPlan, ...]:
    plans = []
    for name, layer in layers.items():
        style = hints.get(name, "replicate")
        pieces = (in_features(layer),) if style == "row" else trace.pieces.get(name, (out_features(layer),))
        if style != "replicate" and not any(piece % size for piece in pieces):
            plans.append(LayerPlan(name, style, () if style == "row" else pieces, "by base_model_tp_plan"))
    return tuple(plans)


def _assign(
    trace: Trace, layers: Mapping[str, nn.Module], blocked: frozenset[str]
) -> tuple[dict[str, frozenset[str]], set[str]]:
    """Row-wise layers with the column-wise ones that feed them, none of ``blocked``; the heaviest rows choose first."""
    rows: dict[str, frozenset[str]] = {}
    columns: set[str] = set()
    weight = {name: in_features(layer) * out_features(layer) for name, layer in layers.items()}
    for name in sorted(trace.inputs, key=lambda n: (-weight[n], n)):
        feeding = trace.inputs[name]
        if not feeding or feeding & blocked or name in columns or any(f in rows for f in feeding):
            continue
        rows[name] = feeding
        columns |= feeding
    return rows, columns


def _connected(rows: Mapping[str, frozenset[str]]) -> list[set[str]]:
    """Rows and columns that hang together."""
    parts: list[set[str]] = []
    for row, feeding in rows.items():
        mine = {row, *feeding}
        apart = [part for part in parts if not part & mine]
        for part in parts:
            if part & mine:
                mine |= part
        parts = [*apart, mine]
    return sorted(parts, key=lambda part: min(part))


def _group(
    members: set[str], rows: Mapping[str, frozenset[str]], trace: Trace, layers: Mapping[str, nn.Module], size: int
) -> tuple[LayerGroup | None, str]:
    plans: list[LayerPlan] = []
    for name in sorted(members):
        if name in rows:
            if in_features(layers[name]) % size:
                return None, f"{in_features(layers[name])} inputs of {name} are not divisible by {size}"
            plans.append(LayerPlan(name, "row", why="fed by " + ", ".join(sorted(rows[name]))))
            continue
        users = {user for user, feeding in trace.inputs.items() if name in feeding}
        if not users <= set(rows):
            return None, f"the output of {name} is used outside"
        pieces = trace.pieces.get(name, (out_features(layers[name]),))
        if any(piece % size for piece in pieces):
            return None, f"the outputs of {name} ({' + '.join(map(str, pieces))}) are not divisible by {size}"
        plans.append(LayerPlan(name, "column", pieces, "feeds " + ", ".join(sorted(users))))
    return LayerGroup(tuple(plans)), ""


def with_user_plan(
    groups: Sequence[LayerGroup], prefix: str, block: nn.Module, plan: Mapping[str, str], size: int
) -> list[LayerGroup]:
    """Let a user's patterns (over full names) override or complete what was derived.

    Raises:
        ValueError: for a style that does not fit its layer.
    """
    layers = {f"{prefix}.{name}" if prefix else name: layer for name, layer in linears(block).items()}
    asked = {name.removeprefix(f"{prefix}."): style for name, style in asked_styles(layers, plan).items()}
    by_name = {name.removeprefix(f"{prefix}."): layer for name, layer in layers.items()}
    if not asked:
        return list(groups)
    changed = [LayerGroup(kept) for group in groups
               if (kept := tuple(layer for layer in group.layers if layer.name not in asked))]  # fmt: skip
    mine: list[LayerPlan] = []
    for name, text in asked.items():
        layer = by_name[name]
        try:
            style, pieces = parse_style(text, out_features(layer))
        except ValueError as error:
            raise ValueError(f"TensorParallel(plan=...): '{prefix}.{name}': {error}") from error
        if style == "vocab":
            raise ValueError(
                f"TensorParallel(plan=...): '{prefix}.{name}' stands in a repeated block; 'vocab' is for embeddings and"
                " output heads outside of them. Use 'column_gather' for a layer whose whole output is used"
            )
        numbers = (in_features(layer),) if style == "row" else pieces
        if style != "replicate" and any(number % size for number in numbers):
            raise ValueError(
                f"TensorParallel(plan=...): '{prefix}.{name}' cannot be {text}: {' + '.join(map(str, numbers))} is not"
                f" divisible by tensor_parallel_size={size}. Use 'replicate', or another size"
            )
        if style != "replicate":
            mine.append(LayerPlan(name, style, () if style == "row" else pieces, "asked for"))
    joined = tuple(layer for group in changed for layer in group.layers)
    return [LayerGroup((*joined, *mine))] if mine else changed
