"""State that no stage owns: buffers, and parameters that no step uses. Every stage holds it; whose is right?

A hook that keeps averages as buffers or as a copy of the module changes, on each stage, those of the stage's own
parameters. So of each tensor the value counts that a stage has changed; where several have, in different ways, there is
none that one process would have.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_effi.compat import dtensor as dtensor_compat
from lightning_effi.context import Group
from lightning_effi.pipeline_parallel.other_stages import OtherStages

Print = tuple[Any, ...]


class CommonState:
    """Finds the stage whose value of a tensor counts.

    Args:
        module: split into stages.
        parameters: names of those that every stage holds.
        holder: gives the first stage that holds a parameter.
        stand_ins: of the parameters of other stages.
        group: the ranks of the pipeline, in the order of stages.
    """

    def __init__(
        self,
        module: nn.Module,
        parameters: Iterable[str],
        holder: Callable[[str], int],
        stand_ins: OtherStages,
        group: Group,
    ) -> None:
        self._module, self._holder, self._stand_ins, self._group = module, holder, stand_ins, group
        self._parameters = tuple(parameters)
        self._before: dict[str, Print] = {}
        self.note()

    def note(self) -> None:
        """All stages hold the same now, as after the split and after a checkpoint was loaded."""
        self._before = {name: fingerprint(tensor) for name, tensor in self.tensors().items()}

    def tensors(self) -> dict[str, Tensor]:
        """By name; a tensor with two names has both."""
        held: dict[str, Tensor] = dict(self._module.named_buffers(remove_duplicate=False))
        return held | {name: self._module.get_parameter(name) for name in self._parameters}

    def sources(self, wanted: Iterable[str] | None = None) -> dict[str, int]:
        """The stage whose value counts, of each tensor that any stage has changed; every rank must call this.

        Args:
            wanted: names for which there must be such a stage.

        Raises:
            RuntimeError: on all ranks, where stages have changed one of these in different ways.
        """
        mine = {}
        for name, tensor in self.tensors().items():
            now = fingerprint(tensor)
            if now != self._before.get(name):
                mine[name] = now, self._stand_ins.parameter_behind(tensor)
        control = self._group.control
        everybodys: list[dict[str, tuple[Print, str | None]]] = [{} for _ in range(dist.get_world_size(control))]
        dist.all_gather_object(everybodys, mine, group=control)
        found = {}
        for name in dict.fromkeys(name for each in everybodys for name in each):
            changed = {stage: each[name] for stage, each in enumerate(everybodys) if name in each}
            followed = next((parameter for _, parameter in changed.values() if parameter is not None), None)
            if followed is not None:
                found[name] = self._holder(followed)
            elif len({value for value, _ in changed.values()}) == 1 or wanted is None:
                found[name] = min(changed)
            elif name in wanted:
                raise RuntimeError(
                    f"pipeline: hooks have given '{name}' other values on stage {min(changed)} than on stage"
                    f" {max(changed)}, so that none of them is that of one process. What is computed from all"
                    " parameters or gradients is not known on a stage. Keep what belongs to one parameter in a tensor"
                    " of its own, or use pipeline_parallel_size=1"
                )
        return found

    def spread(self, ranks: Mapping[int, int]) -> None:
        """Give every stage the values that count; every rank must call this.

        Args:
            ranks: the global rank of each stage.
        """
        control = self._group.control
        stage = dist.get_rank(control)
        for name, source in self.sources().items():
            tensor = self.tensors()[name]
            message: list[Any] = [tensor.detach().cpu() if stage == source else None]
            dist.broadcast_object_list(message, ranks[source], group=control)
            if stage != source and message[0] is not None:
                self._set(name, tensor, message[0])

    @torch.no_grad()
    def _set(self, name: str, tensor: Tensor, value: Tensor) -> None:
        if tensor.shape == value.shape:
            tensor.copy_(value)
            return
        owner, _, key = name.rpartition(".")
        self._module.get_submodule(owner)._buffers[key] = value.to(tensor.device)


def fingerprint(tensor: Tensor) -> Print:
    """Equal for equal tensors; of a sharded one, of this rank's part."""
    local = dtensor_compat.local_tensor(tensor).detach().cpu().contiguous()
    return tuple(local.shape), str(local.dtype), zlib.crc32(local.reshape(-1).view(torch.uint8).numpy().tobytes())
