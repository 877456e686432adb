"""Plan a module's tensor parallelism: capture, trace, decide, probe; a group of layers that fails stays whole."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.utils._pytree import tree_leaves

from lightning_effi.modules import Block
from lightning_effi.tensor_parallel.layers.linear import linears
from lightning_effi.tensor_parallel.layers.sequence import hidden_states
from lightning_effi.tensor_parallel.planning.capture import BlockKind
from lightning_effi.tensor_parallel.planning.decide import LayerGroup, decide, with_user_plan
from lightning_effi.tensor_parallel.planning.hints import Hints, read_hints
from lightning_effi.tensor_parallel.planning.plan import LayerPlan, SequencePlan, TensorPlan, asked_styles, stars
from lightning_effi.tensor_parallel.planning.probe import BlockProbe, Verdict
from lightning_effi.tensor_parallel.planning.trace import Trace, trace_block
from lightning_effi.tensor_parallel.planning.vocabulary import ends, plan_vocabulary


@dataclass(frozen=True)
class Planner:
    """Plans for the ranks of one tensor-parallel group.

    Attributes:
        mesh: the ``tp`` axis.
        control_group: its ranks, with a backend for CPU tensors.
        user_plan: patterns and styles that override what is derived.
        sequence_parallel: whether the blocks work on parts of the sequence between their split layers.
        vocabulary: whether embeddings and output layers may be split.
    """

    mesh: Any
    control_group: Any
    user_plan: Mapping[str, str]
    sequence_parallel: bool = False
    vocabulary: bool = True

    def plan(self, module: nn.Module, blocks: Sequence[Block], kinds: Sequence[BlockKind]) -> TensorPlan:
        """Decide for each kind of block.

        Args:
            module: whole.
            blocks: all of its blocks.
            kinds: those that a step on a real batch has called, with what they were given.

        Raises:
            ValueError: where nothing can be split, or a user's plan does not fit or gives wrong numbers.
        """
        outside = self._refuse_unknown_names(module, blocks)
        hints = read_hints(module)
        layers: list[LayerPlan] = []
        dims: dict[str, int] = {}
        handing_out: list[str] = []
        whole: list[str] = list(hints.unknown)
        for kind in kinds:
            trace = trace_block(kind.blocks[0].module, *_fresh(kind))
            found, left, hands_out = self._plan_kind(kind, trace, hints)
            if hands_out:
                handing_out += [block.name for block in kind.blocks]
            name = _pattern(kind)
            whole += [f"{name}: {reason}" for reason in left]
            layers += [layer.below(block.name) for block in kind.blocks for layer in found]
            if self.sequence_parallel and found:
                dims |= dict.fromkeys((block.name for block in kind.blocks), self._sequence_dim(kind, found))
        asked = asked_styles(outside, self.user_plan)
        if not layers and "vocab" not in asked.values():
            details = "; ".join(whole) or "no repeated blocks with linear layers ran in the first step"
            raise ValueError(
                f"tensor_parallel_size={self.mesh.size()} finds nothing to split in {type(module).__name__}: {details}."
                " Use tensor_parallel_size=1"
            )
        found, left = self._plan_vocabulary(module, blocks, asked)
        whole += left
        layers += found
        but = f" but {', '.join(layer.name for layer in found)}" if found else ""
        whole.append(f"everything outside the blocks{but}")
        counts = _count(module, layers, self.mesh.size())
        return TensorPlan(
            self.mesh.size(), tuple(layers), _sequence(blocks, dims), tuple(handing_out), tuple(whole), *counts
        )

    def _plan_vocabulary(
        self, module: nn.Module, blocks: Sequence[Block], asked: Mapping[str, str]
    ) -> tuple[list[LayerPlan], list[str]]:
        if self.vocabulary:
            return plan_vocabulary(module, blocks, asked, self.mesh.size())
        if asked:
            raise ValueError(
                f"TensorParallel(plan=...): {', '.join(asked)} lies outside the blocks, where a pipeline leaves layers"
                " whole. Leave it out, or use pipeline_parallel_size=1"
            )
        return [], ["embeddings and output layers, which a pipeline leaves whole"]

    def _plan_kind(self, kind: BlockKind, trace: Trace, hints: Hints) -> tuple[list[LayerPlan], list[str], bool]:
        """The layers to split, what stays whole with the reason, and whether the block hands out parts."""
        first = kind.blocks[0]
        groups, whole = decide(first.module, trace, self.mesh.size(), hints.inside(first.name, first.module))
        asked = self._asked(first.name, first.module)
        groups = with_user_plan(groups, first.name, first.module, asked, self.mesh.size())
        if not groups:
            return [], whole, False
        probe = BlockProbe(first.module, kind.args, kind.kwargs, self.mesh, self.control_group)
        if any(style != "replicate" for style in asked.values()):
            layers, verdict = self._require(probe, groups, first.name)
            return list(layers), whole, verdict.hands_out
        kept: list[LayerPlan] = []
        verdicts: list[Verdict] = []
        for group in groups:
            passed, verdict, reason = self._settle(probe, group)
            if passed is not None:
                kept += passed.layers
                verdicts.append(verdict)
            if reason:
                whole.append(reason)
        if len(verdicts) > 1 and not (together := probe.judge(kept)).passed:
            return [], [*whole, f"everything in the block: {together.reason}"], False
        return kept, whole, any(verdict.hands_out for verdict in verdicts)

    def _sequence_dim(self, kind: BlockKind, layers: list[LayerPlan]) -> int:
        """The dim of the hidden states that ``kind`` can have split between ``layers``.

        Raises:
            ValueError: where it cannot.
        """
        leaves = tree_leaves((kind.args, kind.kwargs))
        index = hidden_states(leaves)
        if index is None:
            reason = "none of its arguments is a floating-point tensor [rows, positions, width]"
        else:
            # rows or positions, whichever the module puts first: the longer of both leaves the ranks more alike
            dim = 1 if leaves[index].shape[1] >= leaves[index].shape[0] else 0
            probe = BlockProbe(kind.blocks[0].module, kind.args, kind.kwargs, self.mesh, self.control_group)
            verdict = probe.judge(layers, dim)
            if verdict.passed and not verdict.gathers_sequence:
                return dim
            reason = verdict.reason or f"{', '.join(verdict.gathers_sequence)} would have to see all positions"
        raise ValueError(
            f"TensorParallel(sequence_parallel=True): '{_pattern(kind)}' cannot work on parts of the sequence:"
            f" {reason}. Use sequence_parallel=False"
        )

    def _settle(self, probe: BlockProbe, group: LayerGroup) -> tuple[LayerGroup | None, Verdict, str]:
        """The part of a group that passes the probe, the last verdict, and why the rest does not."""
        current: LayerGroup | None = group
        verdict = Verdict(False)
        reasons: list[str] = []
        unpacked: dict[str, str] = {}  # the layers that are not taken for packed any more, with the reason
        while current is not None:
            verdict = probe.judge(current.layers)
            if verdict.gathers:
                reasons.append(f"activations of {current.name}: gathered for {', '.join(verdict.gathers)}")
            if verdict.passed:
                return current, verdict, "; ".join(reasons)
            guilty = verdict.sources & {layer.name for layer in current.layers}
            if not guilty:
                reasons.append(f"{current.name}: {verdict.reason}")
                return None, verdict, "; ".join(reasons)
            packed = {layer.name for layer in current.layers if layer.name in guilty and len(layer.pieces) > 1}
            if packed and packed == guilty:
                unpacked |= dict.fromkeys(packed, verdict.reason)
                current = current.unpacked(packed)
                continue
            reason = next((unpacked[name] for name in sorted(guilty) if name in unpacked), verdict.reason)
            reasons.append(f"{', '.join(name or 'the block itself' for name in sorted(guilty))}: {reason}")
            current = current.without(guilty)
        return None, verdict, "; ".join(reasons)

    def _require(self, probe: BlockProbe, groups: list[LayerGroup], name: str) -> tuple[tuple[LayerPlan, ...], Verdict]:
        layers = tuple(layer for group in groups for layer in group.layers)
        verdict: Verdict = probe.judge(layers)
        if not verdict.passed:
            raise ValueError(
                f"TensorParallel(plan=...) does not compute what '{name}' does: {verdict.reason}. Nothing was trained."
                " Correct the plan, or leave it out to have one derived"
            )
        return layers, verdict

    def _asked(self, prefix: str, block: nn.Module) -> dict[str, str]:
        names = {f"{prefix}.{name}": layer for name, layer in linears(block).items()}
        return asked_styles(names, self.user_plan)

    def _refuse_unknown_names(self, module: nn.Module, blocks: Any) -> dict[str, nn.Module]:
        """The tables and linear layers outside the blocks, which may be named as well as those inside."""
        outside = ends(module, blocks)
        known = {f"{block.name}.{name}": layer for block in blocks for name, layer in linears(block.module).items()}
        known |= outside
        for pattern, style in self.user_plan.items():
            if not asked_styles(known, {pattern: style}):
                raise ValueError(
                    f"TensorParallel(plan=...): no linear layer or embedding of {type(module).__name__} is called"
                    f" '{pattern}'. There are {', '.join(sorted({stars(name) for name in known})) or 'none'}"
                )
        return outside


def _fresh(kind: BlockKind) -> tuple[Any, Any]:
    return copy.deepcopy((kind.args, kind.kwargs))


def _pattern(kind: BlockKind) -> str:
    return stars(kind.blocks[0].name) if len(kind.blocks) > 1 else kind.blocks[0].name


def _sequence(blocks: Sequence[Block], dims: Mapping[str, int]) -> tuple[SequencePlan, ...]:
    """The blocks in ``dims``; one hands its part on where the next of the same list takes it, and nobody looks at it.

    A forward hook of the user's may want the values on one rank alone, which then could not be gathered.
    """
    plans = []
    for block, following in zip(blocks, [*blocks[1:], None], strict=True):
        if block.name in dims:
            handed_on = (
                following is not None
                and following.name.rpartition(".")[0] == block.name.rpartition(".")[0]
                and dims.get(following.name) == dims[block.name]
                and not (block.module._forward_hooks or following.module._forward_pre_hooks)
            )
            plans.append(SequencePlan(block.name, dims[block.name], gathers=not handed_on))
    return tuple(plans)


def _count(module: nn.Module, layers: Sequence[LayerPlan], size: int) -> tuple[int, int, int]:
    """Parameters of the module, of the rank that holds most of it, and those that every rank holds."""
    total = sum(p.numel() for p in module.parameters())
    split: dict[int, tuple[int, int]] = {}  # of each parameter that is split: all of it, and the largest part
    for layer in layers:
        for name, parameter in module.get_submodule(layer.name).named_parameters():
            if name == "out_proj.bias" or (name == "bias" and layer.style == "row"):
                continue
            rows = layer.pieces[0] if layer.style == "vocab" else size
            split[id(parameter)] = (parameter.numel(), parameter.numel() // rows * -(-rows // size))
    whole = total - sum(numel for numel, _ in split.values())
    return total, whole + sum(part for _, part in split.values()), whole
