"""The trunk of a module (the list, or lists, of its repeated blocks) and the units outside it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from lightning_effi.modules.blocks import find_blocks, shared_parts

# A list of blocks this much smaller than the largest one (a projection head of two linears) is no trunk.
_SMALLEST_TRUNK = 0.3


@dataclass(frozen=True)
class Trunk:
    """Names of what a pipeline can hand to stages.

    Attributes:
        blocks: the repeated layers, by name.
        units: the outermost modules with parameters beside the blocks; a module with two names has its first.
        shared: what keeps further repeated layers from being blocks.
    """

    blocks: tuple[str, ...]
    units: tuple[str, ...]
    shared: tuple[str, ...] = ()


def find_trunk(root: nn.Module) -> Trunk:
    """The blocks of the large lists of ``root`` (two for an encoder-decoder), and the units outside them."""
    lists: dict[str, list[str]] = {}
    for block in find_blocks(root):
        lists.setdefault(block.name.rpartition(".")[0], []).append(block.name)
    sizes = {name: sum(_numel(root.get_submodule(block)) for block in blocks) for name, blocks in lists.items()}
    largest = max(sizes.values(), default=0)
    trunks = [name for name, size in sizes.items() if size > _SMALLEST_TRUNK * largest]
    blocks = tuple(block for name in trunks for block in lists[name])
    return Trunk(blocks, tuple(_units(root, set(blocks))), tuple(shared_parts(root)))


def _units(root: nn.Module, blocks: set[str]) -> list[str]:
    ancestors = {""}
    for block in blocks:
        parts = block.split(".")
        ancestors.update(".".join(parts[:length]) for length in range(1, len(parts)))
    units: dict[int, str] = {}
    for name, module in root.named_modules():
        parent = name.rpartition(".")[0]
        inside = name and parent in ancestors and name not in ancestors and name not in blocks
        if inside and any(True for _ in module.parameters()):
            units.setdefault(id(module), name)
    return list(units.values())


def _numel(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
