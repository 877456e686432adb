"""Which embedding tables and output heads are split by rows of the vocabulary. Pure: names, shapes and ties decide.

Nothing about their use has to be known: a table gives whole embeddings, and logits become whole for whatever does not
work on their parts. What is split is what is large, since each table costs a message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from lightning_effi.modules import Block
from lightning_effi.tensor_parallel.layers.linear import linears, out_features
from lightning_effi.tensor_parallel.planning.plan import LayerPlan

_STYLES = ("vocab", "replicate")
_SMALLEST_TABLE = 0.1  # of the largest one; position embeddings and token types are not worth a message
_FEWEST_ROWS = 8


def ends(module: nn.Module, blocks: Sequence[Block]) -> dict[str, Any]:
    """The embedding tables, then the linear layers outside the repeated blocks, by name."""
    inside = {id(child) for block in blocks for child in block.module.modules()}
    tables = {name: child for name, child in sorted(module.named_modules()) if isinstance(child, nn.Embedding)}
    return {
        name: child
        for name, child in {**tables, **linears(module)}.items()
        if id(child) not in inside and child._parameters.get("weight") is not None
    }


def plan_vocabulary(
    module: nn.Module, blocks: Sequence[Block], asked: Mapping[str, str], size: int
) -> tuple[list[LayerPlan], list[str]]:
    """The layers that are split by vocabulary, and what stays whole against expectation, with the reason.

    Args:
        module: the whole module.
        blocks: its repeated blocks.
        asked: the styles that a user wants, by name.
        size: number of ranks.

    Raises:
        ValueError: for a style that a layer outside the blocks cannot have.
    """
    outside = ends(module, blocks)
    largest = max((layer.weight.numel() for layer in outside.values() if isinstance(layer, nn.Embedding)), default=0)
    tables: dict[int, str] = {}  # number of rows → name, of those that are split
    layers: list[LayerPlan] = []
    whole: list[str] = []
    for names in _by_weight(outside):
        members = [outside[name] for name in names]
        wish = _wish(names, asked)
        is_table = isinstance(members[0], nn.Embedding)
        rows = members[0].num_embeddings if is_table else out_features(members[0])
        is_large = is_table and _is_vocabulary(members[0]) and members[0].weight.numel() >= _SMALLEST_TABLE * largest
        if wish == "replicate":
            whole.append(f"{', '.join(names)}: asked for")
        elif wish or is_large or (not is_table and rows in tables):
            if reason := _obstacle(members, rows, size):
                if wish:
                    raise ValueError(
                        f"TensorParallel(plan=...): '{names[0]}' cannot be split by vocabulary: {reason}. Use"
                        " 'replicate', or leave it out"
                    )
                whole.append(f"{', '.join(names)}: {reason}")
                continue
            why = "asked for" if wish else f"{rows} rows" if is_table else f"as many outputs as {tables[rows]} has rows"
            layers.append(LayerPlan(names[0], "vocab", (rows,), why))
            layers += [LayerPlan(name, "vocab", (rows,), f"tied to {names[0]}") for name in names[1:]]
            if is_table:
                tables.setdefault(rows, names[0])
    return layers, whole


def _by_weight(outside: Mapping[str, Any]) -> list[list[str]]:
    """Names of layers that share a weight, tables first."""
    groups: dict[int, list[str]] = {}
    for name, layer in outside.items():
        groups.setdefault(id(layer.weight), []).append(name)
    return list(groups.values())


def _is_vocabulary(table: nn.Embedding) -> bool:
    """Not so a table of four kinds of something: a layer with four outputs is then no head over a vocabulary."""
    return table.num_embeddings >= max(table.embedding_dim, _FEWEST_ROWS)


def _wish(names: Sequence[str], asked: Mapping[str, str]) -> str:
    """The style that a user wants for layers that share a weight; empty where none was given."""
    wanted = {name: asked[name] for name in names if name in asked}
    for name, style in wanted.items():
        if style not in _STYLES:
            raise ValueError(
                f"TensorParallel(plan=...): '{name}' stands outside the repeated blocks, where a layer can be"
                f" {' or '.join(_STYLES)}, not {style}"
            )
    if len(set(wanted.values())) > 1:
        raise ValueError(
            f"TensorParallel(plan=...): {' and '.join(wanted)} share a weight and are given different styles. Give"
            " them the same one"
        )
    return next(iter(wanted.values()), "")


def _obstacle(members: Sequence[Any], rows: int, size: int) -> str:
    """Why layers that share a weight cannot be split by rows; empty where they can."""
    if -(-rows // size) * (size - 1) >= rows:
        return f"{rows} rows are too few for {size} ranks"
    for table in (member for member in members if isinstance(member, nn.Embedding)):
        for setting in ("max_norm", "scale_grad_by_freq", "sparse"):
            if getattr(table, setting):
                return f"{setting}={getattr(table, setting)} looks at the whole table"
    return ""
