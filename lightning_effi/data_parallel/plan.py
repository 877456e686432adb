"""Which parameters are sharded together, in which dtype they are computed with, and what that costs a rank.

Planning is pure: it needs no process group and works on meta tensors for any world size.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from lightning_effi.layout import Layout
from lightning_effi.modules import ParameterInfo, describe_parameters, find_blocks, shared_parts

ROOT = ""

# Only these run their matmul in low precision under autocast whatever the dtype of their weight, so that their
# weights can be gathered in that dtype without a visible difference. HF's Conv1D (GPT-2) is known by its name so that
# transformers need not be imported.
_MATMUL_MODULES = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.MultiheadAttention)
_MATMUL_CLASS_NAMES = frozenset({"Conv1D"})


@dataclass(frozen=True)
class Compute:
    """What a precision setting asks of sharding.

    Attributes:
        dtype: dtype in which gathered parameters are used; ``None`` is the dtype in which they are stored.
        everywhere: ``dtype`` holds for all parameters; otherwise only for the matmul weights of blocks.
        reduce_dtype: dtype in which gradients are summed over ranks; ``None`` is the gradient's own.
        keep_fp32: name patterns of modules that keep the stored dtype.
    """

    dtype: torch.dtype | None = None
    everywhere: bool = False
    reduce_dtype: torch.dtype | None = None
    keep_fp32: tuple[str, ...] = ()


@dataclass(frozen=True)
class ShardGroup:
    """Parameters that are gathered and reduced in one message. ``module`` is ``""`` for the root."""

    module: str
    parameters: tuple[ParameterInfo, ...]
    low_precision: frozenset[str] = frozenset()

    @property
    def numel(self) -> int:
        return sum(parameter.numel for parameter in self.parameters)


@dataclass(frozen=True)
class ShardingPlan:
    """The shard groups of a module under a layout. ``print(plan)`` tells what is sharded and what it costs."""

    zero_stage: int
    layout: Layout
    groups: tuple[ShardGroup, ...]
    replicated: tuple[ParameterInfo, ...]
    compute: Compute
    shared: tuple[str, ...] = ()
    """What keeps further repeated layers from having groups of their own."""

    @property
    def is_sharded(self) -> bool:
        """Whether parameters are held as shards between steps (FSDP2 is at work)."""
        return bool(self.groups)

    def bytes_per_rank(self, moments: int | None) -> dict[str, int]:
        """Bytes that one rank holds at the end of a window's last backward but one, or of its only one.

        In stage 1 the gradients of a window add up in full size before they are sharded, in the dtype in which they are
        reduced, and on a pipeline's stage, which also gathers its parameters once for all micro-batches, those of a
        step.

        Args:
            moments: tensors of the parameter's shape that the optimizer keeps (Adam 2, plain SGD 0); ``None`` where
                the optimizer is not known, and the entry is left out.
        """
        shards = self.layout.shard
        every = [p for group in self.groups for p in group.parameters]
        replicated = sum(p.bytes for p in self.replicated if p.trainable)
        trainable = sum(_shard_bytes(p, shards) for p in every if p.trainable) + replicated
        costs = {
            "parameters": sum(_shard_bytes(p, shards) for p in every) + sum(p.bytes for p in self.replicated),
            "gradients": trainable
            if (self.zero_stage >= 2 and self.layout.pipeline == 1) or not self.is_sharded
            else self._full_gradients + replicated,
        }
        if moments is not None:
            costs["optimizer states"] = moments * trainable
        if self.is_sharded:
            largest = (self._gathered_bytes(group) for group in self.groups)
            one_by_one = self.zero_stage == 3 and self.layout.pipeline == 1
            costs["gathered parameters"] = max(largest) if one_by_one else sum(largest)
        return costs

    @property
    def _full_gradients(self) -> int:
        return sum(
            p.numel // p.parts * (self.compute.reduce_dtype or self.compute_dtype(group, p)).itemsize
            for group in self.groups
            for p in group.parameters
            if p.trainable
        )

    def _gathered_bytes(self, group: ShardGroup) -> int:
        return sum(p.numel // p.parts * self.compute_dtype(group, p).itemsize for p in group.parameters)

    def compute_dtype(self, group: ShardGroup, parameter: ParameterInfo) -> torch.dtype:
        """The dtype in which the forward sees the parameter."""
        low = self.compute.dtype is not None and parameter.name in group.low_precision
        return self.compute.dtype if low and self.compute.dtype is not None else parameter.dtype

    def __str__(self) -> str:
        if self.layout.data_parallel_size == 1 and not self.groups:
            return f"data parallel: one {'process' if self.layout.tensor == 1 else 'group'}, nothing is sharded"
        if not self.is_sharded:
            return f"ZeRO stage 0: {self.layout.replicate} full copies, whose gradients are averaged"
        what = ("nothing", "optimizer states", "optimizer states and gradients",
                "optimizer states, gradients and parameters")[self.zero_stage]  # fmt: skip
        copies = f", in {self.layout.replicate} copies" if self.layout.replicate > 1 else ""
        blocks = [group for group in self.groups if group.module != ROOT]
        outside = sum(group.numel for group in self.groups if group.module == ROOT)
        lines = [
            f"ZeRO stage {self.zero_stage}: {what} sharded over {self.layout.shard} ranks{copies}",
            f"shard groups: {_describe_blocks(blocks)}; {outside:,} parameters outside the blocks",
        ]
        if self.shared:
            lines.append("outside the blocks since it is shared: " + "; ".join(self.shared))
        if self.replicated:
            lines.append("replicated (scalars, or empty): " + ", ".join(p.name for p in self.replicated))
        return "\n".join(lines)


def shards(layout: Layout, zero_stage: int, compute: Compute) -> bool:
    """Whether parameters are held as shards (FSDP2 is at work), if there are any.

    So they are with ``zero_stage=0`` too, each whole, where they are computed with in another dtype than they are
    stored in, or are DTensors of tensor parallelism already, which DistributedDataParallel cannot average.
    """
    return compute.everywhere or (layout.data_parallel_size > 1 and (zero_stage > 0 or layout.tensor > 1))


def plan_sharding(
    module: nn.Module, layout: Layout, zero_stage: int, compute: Compute, blocks: Sequence[str] | None = None
) -> ShardingPlan:
    """Group the parameters of ``module``: one group per block, the rest with the root.

    Scalars and parameters without elements are replicated, since FSDP2 cannot shard them.

    Args:
        module: whole, or cut down to one stage of a pipeline.
        layout: of the ranks.
        zero_stage: 0 to 3.
        compute: what the precision asks for.
        blocks: names of the blocks, where they are known already.
    """
    infos = describe_parameters(module)
    whole = tuple(info for info in infos if not _can_be_sharded(info))
    if not shards(layout, zero_stage, compute):
        return ShardingPlan(zero_stage, layout, (), tuple(infos), compute)

    shared: tuple[str, ...] = ()
    if blocks is None:
        shared = tuple(shared_parts(module))
        blocks = [block.name for block in find_blocks(module)]
    members: dict[str, list[ParameterInfo]] = {name: [] for name in [*blocks, ROOT]}
    for info in infos:
        if _can_be_sharded(info):
            members[_owner(info.name, members)].append(info)
    low = _low_precision_names(module, infos, compute, blocks)
    groups = tuple(
        ShardGroup(name, tuple(found), frozenset(low.intersection(p.name for p in found)))
        for name, found in members.items()
        if found
    )
    return ShardingPlan(zero_stage, layout, groups, whole, compute, shared)


def everywhere_low(module: nn.Module, compute: Compute) -> set[str]:
    """Names of the parameters in low precision where that holds for all but those kept or whole."""
    kept = _names_below(module, [name for name, _ in module.named_modules() if _matches(name, compute.keep_fp32)])
    return {info.name for info in describe_parameters(module) if _can_be_sharded(info)} - kept


def _can_be_sharded(info: ParameterInfo) -> bool:
    return bool(info.shape) and info.numel > 0


def _owner(parameter: str, blocks: Iterable[str]) -> str:
    parts = parameter.split(".")
    for length in range(len(parts) - 1, 0, -1):
        prefix = ".".join(parts[:length])
        if prefix in blocks:
            return prefix
    return ROOT


def _low_precision_names(
    module: nn.Module, infos: Sequence[ParameterInfo], compute: Compute, blocks: Sequence[str]
) -> set[str]:
    if compute.dtype is None:
        return set()
    kept = _names_below(module, [name for name, _ in module.named_modules() if _matches(name, compute.keep_fp32)])
    if compute.everywhere:
        return everywhere_low(module, compute)
    matmul = [name for name, child in module.named_modules() if _is_matmul(child)]
    in_blocks = {info.name for info in infos if _owner(info.name, blocks) != ROOT}
    return (_names_below(module, matmul) & in_blocks) - kept


def _names_below(module: nn.Module, names: Iterable[str]) -> set[str]:
    return {
        f"{name}.{parameter}" if name else parameter
        for name in names
        for parameter, _ in module.get_submodule(name).named_parameters()
    }


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _is_matmul(module: nn.Module) -> bool:
    return isinstance(module, _MATMUL_MODULES) or type(module).__name__ in _MATMUL_CLASS_NAMES


def _shard_bytes(parameter: ParameterInfo, shards: int) -> int:
    """FSDP2 cuts dim 0 into equal, padded pieces."""
    if not parameter.shape or not parameter.numel:
        return parameter.bytes
    rows = -(-parameter.shape[0] // shards)
    return rows * (parameter.numel // parameter.shape[0]) * parameter.dtype.itemsize // parameter.parts


def _describe_blocks(blocks: Sequence[ShardGroup]) -> str:
    if not blocks:
        return "no repeated blocks found"
    prefixes = dict.fromkeys(block.module.rpartition(".")[0] for block in blocks)
    sizes = sorted({block.numel for block in blocks})
    span = f"{sizes[0]:,}" if len(sizes) == 1 else f"{sizes[0]:,} to {sizes[-1]:,}"
    return f"{len(blocks)} blocks of {span} parameters in {', '.join(prefixes)}"
