"""What hooks put into a checkpoint beside weights and optimizer states, of which stages may have different values.

Rank zero's checkpoint is the one that is written. Of averages that a hook keeps, each stage has those of its own
parameters, so every tensor is taken from the stage whose parameter it belongs to: the one it was paired with, or the
one whose name is its key.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from lightning_effi.pipeline_parallel.common import fingerprint
from lightning_effi.pipeline_parallel.stage_parameters import StageParameters

_OTHERS = ("state_dict", "optimizer_states", "loops")
Path = tuple[Any, ...]


def complete(checkpoint: dict[str, Any], stages: StageParameters) -> None:
    """Put the right stage's tensors into the first stage's ``checkpoint``; every rank of the pipeline must call this.

    Raises:
        RuntimeError: on all ranks, where stages have different values of what belongs to none of them.
    """
    mine = {path: tensor for key in checkpoint if key not in _OTHERS for path, tensor in _tensors(checkpoint[key], key)}
    prints = {path: (fingerprint(tensor), stages.parameter_behind(tensor)) for path, tensor in mine.items()}
    everybodys = stages.gather_everywhere(prints)
    wanted: dict[Path, int] = {}
    for path in dict.fromkeys(path for each in everybodys for path in each):
        found = {stage: each[path] for stage, each in enumerate(everybodys) if path in each}
        if len({value for value, _ in found.values()}) == 1 and len(found) == len(everybodys):
            continue
        followed = next((name for _, name in found.values() if name is not None), None)
        source = _owner(path, stages) if followed is None else stages.first_holder(followed)
        if source is None or source not in found:
            raise RuntimeError(
                f"pipeline: the stages have put different values into the checkpoint's {_shown(path)}, and it is not"
                " known which of them counts. Keep averages under the names of parameters, or in the order of"
                " parameters(), or use pipeline_parallel_size=1"
            )
        wanted[path] = source
    for path, tensor in stages.bring_to_first(wanted, lambda path: mine[path]).items():
        _put(checkpoint, path, tensor)


def _tensors(tree: Any, *path: Any) -> Iterator[tuple[Path, Tensor]]:
    """Floating-point tensors and where they are; counters and states of generators are each rank's own."""
    if isinstance(tree, Tensor):
        if tree.is_floating_point():
            yield path, tree
    elif isinstance(tree, dict):
        for key, value in tree.items():
            yield from _tensors(value, *path, key)
    elif isinstance(tree, (list, tuple)):
        for index, value in enumerate(tree):
            yield from _tensors(value, *path, index)


def _owner(path: Path, stages: StageParameters) -> int | None:
    """The stage of the parameter whose name is a part of the path, or ends with it."""
    for part in reversed([part for part in path if isinstance(part, str)]):
        named = [name for name in stages.owned if f".{name}".endswith(f".{part}") or f".{part}".endswith(f".{name}")]
        holders = {stages.first_holder(name) for name in named}
        if len(holders) == 1:
            return holders.pop()
    return None


def _put(tree: Any, path: Path, tensor: Tensor) -> None:
    """A named tuple's or a tuple's place cannot be written to, so such containers become lists."""
    for at, key in enumerate(path[:-1]):
        if isinstance(tree, dict) and key not in tree:
            tree[key] = {} if isinstance(path[at + 1], str) else []
        if isinstance(tree[key], tuple):
            tree[key] = list(tree[key])
        tree = tree[key]
    tree[path[-1]] = tensor


def _shown(path: Path) -> str:
    return "".join(f"[{part!r}]" for part in path)
