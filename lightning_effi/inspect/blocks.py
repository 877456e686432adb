"""Find the repeated transformer blocks of a module nobody prepared.

A block is a child of a container (``ModuleList``, ``Sequential``, ``ModuleDict``) that holds at least two children of
the same class with parameters: ``model.layers.0``, ``encoder.layer.3``, ``blocks.11``. That is how every common
library writes its trunk, so neither class names nor a registry are needed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

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

    Left out, so that they stay with the root: modules whose ``forward`` is never called (nested containers, whose
    own children are looked at instead), modules that stand in the tree twice, and modules that share a parameter
    with anything outside themselves.
    """
    seen = Counter(id(module) for _, module in root.named_modules(remove_duplicate=False))
    owners = _parameter_owners(root)
    return [
        Block(name, module)
        for name, module in _candidates("", root)
        if seen[id(module)] == 1 and not _shares_parameters(module, owners)
    ]


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


def _parameter_owners(root: nn.Module) -> Counter[int]:
    """How many (module, name) places hold each parameter."""
    return Counter(
        id(parameter) for module in root.modules() for parameter in module._parameters.values() if parameter is not None
    )


def _shares_parameters(block: nn.Module, owners: Counter[int]) -> bool:
    return any(owners[parameter] > count for parameter, count in _parameter_owners(block).items())
