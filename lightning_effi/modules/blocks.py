"""Find the repeated transformer blocks of a module nobody prepared.

A block is a child of a container (``ModuleList``, ``Sequential``, ``ModuleDict``) that holds at least two children of
the same class with parameters: ``model.layers.0``, ``encoder.layer.3``, ``blocks.11``. That is how every common
library writes its trunk, so neither class names nor a registry are needed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

# Containers that only hold modules. Sequential is one too, but it runs its children, and its children run by their
# own ``forward`` either way.
_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)

# A single Linear in a list of Linears is a unit only from this size on: smaller ones cost more in messages than
# their memory is worth.
_MIN_LEAF_PARAMETERS = 1 << 16


@dataclass(frozen=True)
class Block:
    """One repeated layer: its dotted name in the root module and the module itself."""

    name: str
    module: nn.Module


def find_blocks(root: nn.Module) -> list[Block]:
    """The blocks of ``root``, in registration order, outermost containers first, none inside another.

    A block may have several names (``self.layers = self.model.layers``), of which the first is taken. Left out, so that
    they stay with the root: modules whose ``forward`` is never called (nested containers, whose own children are looked
    at instead), and modules that share a parameter, or a module with parameters, with anything outside themselves, see
    :func:`shared_parts`. One activation or one rotary table that all blocks hold is no obstacle.
    """
    found = _outermost(_candidates("", root))
    shared = _shared_parts(root, found)
    return [block for block in found if block.name not in shared]


def shared_parts(root: nn.Module) -> list[str]:
    """What keeps repeated layers of ``root`` from being blocks, a phrase for each part that they share."""
    shared = _shared_parts(root, _outermost(_candidates("", root)))
    firsts: dict[int, tuple[str, nn.Module | nn.Parameter]] = {}
    for name, part in shared.values():
        firsts.setdefault(id(part), (name, part))
    return [_names_of(root, part, name) for name, part in firsts.values()]


def _shared_parts(root: nn.Module, found: Sequence[Block]) -> dict[str, tuple[str, nn.Module | nn.Parameter]]:
    """By the name of each block that does not stand alone: the first of its parts that others have too."""
    uses = Counter(id(module) for block in found for module in block.module.modules())
    owners: dict[int, set[int]] = {}
    for (module, _), parameter in _places(root).items():
        owners.setdefault(id(parameter), set()).add(module)

    def shared(block: nn.Module) -> Iterator[tuple[str, nn.Module | nn.Parameter]]:
        for name, part in block.named_modules():
            if uses[id(part)] > 1 and any(True for _ in part.parameters()):
                yield name, part
        inside = {id(module) for module in block.modules()}
        for name, parameter in block.named_parameters():
            if not owners[id(parameter)] <= inside:
                yield name, parameter

    firsts = {block.name: next(shared(block.module), None) for block in found}
    return {name: (f"{name}.{first[0]}", first[1]) for name, first in firsts.items() if first is not None}


def _names_of(root: nn.Module, part: nn.Module | nn.Parameter, name: str) -> str:
    """A module or parameter by ``name``, and what else it is called."""
    everything: Iterable[tuple[str, Any]] = (
        root.named_modules(remove_duplicate=False)
        if isinstance(part, nn.Module)
        else root.named_parameters(remove_duplicate=False)
    )
    kind = f" ({type(part).__name__})" if isinstance(part, nn.Module) else ""
    second, *more = [f"'{other}'" for other, value in everything if value is part and other != name]
    return f"'{name}'{kind} is also {second}" + (f" and {len(more)} more" if more else "")


def find_all_blocks(root: nn.Module) -> list[Block]:
    """As :func:`find_blocks`, for what is changed in place and needs no group of parameters to itself.

    Also found are the only member of a ``ModuleList`` (a trunk of one block, or of one that is called many times), and
    blocks of one class that share parameters with each other. Where there is none of these, children of one class are
    taken wherever they stand.
    """
    found = _all_candidates(root)
    inside = {place for block in found for place in _places(block.module)}
    elsewhere = {id(parameter) for place, parameter in _places(root).items() if place not in inside}
    roles: dict[int, set[tuple[type[nn.Module], frozenset[str]]]] = {}
    for block in found:
        names: dict[int, set[str]] = {}
        for name, parameter in block.module.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), set()).add(name)
        for key, called in names.items():
            roles.setdefault(key, set()).add((type(block.module), frozenset(called)))
    shared = elsewhere | {key for key, parts in roles.items() if len(parts) > 1}
    return [block for block in found if not any(id(parameter) in shared for parameter in block.module.parameters())]


def _all_candidates(root: nn.Module) -> list[Block]:
    found = dict(_candidates("", root))
    for name, module in root.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == 1 and _is_composite(module[0]):
            only = f"{name}.0" if name else "0"
            if not any(_holds(only, other) or _holds(other, only) for other in found):
                found[only] = module[0]
    return _outermost((found or dict(_siblings("", root))).items())


def _outermost(found: Iterable[tuple[str, nn.Module]]) -> list[Block]:
    """Each module once, by its first name, and none that is part of another."""
    unique: dict[int, Block] = {}
    for name, module in found:
        unique.setdefault(id(module), Block(name, module))
    parts = {id(part) for block in unique.values() for part in block.module.modules() if part is not block.module}
    return [block for key, block in unique.items() if key not in parts]


def _siblings(prefix: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    repeated = _repeated_classes(module)
    for child_name, child in module.named_children():
        name = f"{prefix}.{child_name}" if prefix else child_name
        if type(child) in repeated and _is_composite(child):
            yield name, child
        else:
            yield from _siblings(name, child)


def _is_composite(module: nn.Module) -> bool:
    """Whether ``module`` has children and runs them itself."""
    return not _is_plain_container(module) and any(True for _ in module.children())


def _holds(outer: str, inner: str) -> bool:
    return inner == outer or inner.startswith(f"{outer}.")


def _places(root: nn.Module) -> dict[tuple[int, str], nn.Parameter]:
    """The parameter at each (module, name)."""
    return {
        (id(module), name): parameter
        for module in root.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None
    }


def _candidates(prefix: str, module: nn.Module, in_layer: bool = False) -> Iterator[tuple[str, nn.Module]]:
    """``in_layer``: ``module`` is one of several alike ``ModuleList``s, that is, a layer written as a list of parts."""
    repeated = _repeated_classes(module) if isinstance(module, _CONTAINERS) else set()
    for child_name, child in module.named_children():
        name = f"{prefix}.{child_name}" if prefix else child_name
        if _is_plain_container(child):
            yield from _candidates(name, child, in_layer=type(child) in repeated)
        elif type(child) in repeated or (in_layer and _is_worth_a_group(child)):
            yield name, child
        else:
            yield from _candidates(name, child)


def _repeated_classes(container: nn.Module) -> set[type[nn.Module]]:
    counts = Counter(type(child) for child in container.children() if _is_worth_a_group(child))
    return {kind for kind, count in counts.items() if count >= 2}


def _is_worth_a_group(module: nn.Module) -> bool:
    sizes = [parameter.numel() for parameter in module.parameters()]
    composite = any(True for _ in module.children())
    return bool(sizes) and (composite or sum(sizes) >= _MIN_LEAF_PARAMETERS)


def _is_plain_container(module: nn.Module) -> bool:
    """``ModuleList`` and ``ModuleDict`` have no forward, so no hook on them would ever fire."""
    return isinstance(module, (nn.ModuleList, nn.ModuleDict))
