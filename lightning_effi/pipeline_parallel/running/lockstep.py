"""A step without backward that all ranks of a pipeline run together, value by value.

Each block runs on the rank that holds it. The others go on with a tensor of the right shape whose values are on their
way: they are brought to the rank whose block needs them, or to all once anything else looks at them. So a step may call
blocks several times and in any order, use early values late, and decide by what it has computed. What it costs is that
every rank runs the code around the blocks, and holds what that works on.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_effi.comm.agreement import Agreement
from lightning_effi.comm.waiting import waiting_for
from lightning_effi.compat import torch as torch_compat
from lightning_effi.modules.user_code import here
from lightning_effi.pipeline_parallel.intercept import Interception
from lightning_effi.pipeline_parallel.origins import Origins, tensors_in
from lightning_effi.pipeline_parallel.running.randomness import StageRandomness
from lightning_effi.pipeline_parallel.stand_ins import MetaTree, TensorMeta
from lightning_effi.pipeline_parallel.tree import Spec, tree_flatten, tree_leaves, tree_unflatten

_SHAPES = frozenset(
    {
        *(Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.nelement, Tensor.stride, Tensor.__len__),
        *(Tensor.type, Tensor.is_floating_point, Tensor.is_complex, Tensor.is_contiguous, Tensor.element_size),
    }
)
_ATTRIBUTES = frozenset(
    getattr(Tensor, name).__get__  # type: ignore[attr-defined]
    for name in ("shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_cuda", "is_meta", "grad")
)
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, type)


class Lockstep(TorchFunctionMode):
    """Entered around one run of a step, whose calls of blocks and units go through :meth:`call`.

    Args:
        interception: of the module.
        holders: the places in the pipeline of the ranks that hold each block and unit.
        partly_held: parameters that not every rank holds: the name by the identity of what stands in their place here.
        parameter_holders: the places of the ranks that hold these, by name.
        group: the ranks of the pipeline.
        control: the same, with a backend for objects.
        device: of this rank.
        randomness: of the pipeline.
        known: what modules have returned before; kept from step to step.
    """

    def __init__(
        self,
        interception: Interception,
        holders: Mapping[str, Sequence[int]],
        partly_held: Mapping[int, str],
        parameter_holders: Mapping[str, Sequence[int]],
        *,
        group: Any,
        control: Any,
        device: torch.device,
        randomness: StageRandomness,
        known: dict[Any, Made],
    ) -> None:
        super().__init__()
        self._interception, self._holders = interception, holders
        self._partly_held, self._parameter_holders = partly_held, parameter_holders
        self._group, self._control, self._device, self._randomness = group, control, device, randomness
        self._ranks = dist.get_process_group_ranks(group)
        self._rank = dist.get_rank(group)
        self._agreement = Agreement(control)
        self._knowing: Origins[set[int]] = Origins()
        self._known = known
        self._calls = 0
        self._is_away = False
        self._given: dict[tuple[str, int], Any] = {}

    def call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, list[Any]]:
        """What a block or unit returns, and what it leaves in attributes."""
        with self._away():
            return self._called(name, args, kwargs)

    def _called(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, list[Any]]:
        self._calls += 1
        holders, leaves = self._holders[name], tree_leaves((args, kwargs))
        given = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if len(holders) == len(self._ranks):
            self.reveal(given)
            with torch_compat.function_mode_left(self), self._randomness.of_call(self._calls):
                return self._interception.run_keeping(name, args, kwargs)
        self._refuse_state(name, leaves)
        owner = holders[0]
        for tensor in given:
            self._bring(tensor, owner)
        key = (name, MetaTree.of((args, kwargs)).signature, torch_compat.autocast_dtype())
        if self._rank != owner:
            return self._receive(key, owner, leaves, name)  # type: ignore[no-any-return]
        versions = [_version(tensor) for tensor in given]
        with torch_compat.function_mode_left(self), self._randomness.of_call(self._calls):
            made = self._interception.run_keeping(name, args, kwargs)
        changed = {
            id(tensor) for tensor, old in zip(given, versions, strict=True) if old is None or _version(tensor) != old
        }
        if key not in self._known:
            self._known[key] = Made.of(made, leaves, changed)
            dist.broadcast_object_list([self._known[key]], self._ranks[owner], group=self._control)
        for leaf in tree_leaves(made):
            if isinstance(leaf, Tensor) and (id(leaf) in changed or not any(leaf is each for each in given)):
                self._knowing.note(leaf, {owner})
        return made

    @contextmanager
    def _away(self) -> Iterator[None]:
        """Inside, functions work on tensors as they are: those of a block that runs here, and messages."""
        before, self._is_away = self._is_away, True
        try:
            yield
        finally:
            self._is_away = before

    def reveal(self, tree: Any) -> None:
        """Let all ranks know the values of all tensors in ``tree``."""
        for tensor in tree_leaves(tree):
            knowing = self._knowing.get(tensor) if isinstance(tensor, Tensor) else None
            if knowing is not None and len(knowing) < len(self._ranks):
                with self._away():
                    self._broadcast(tensor, min(knowing))
                knowing.update(range(len(self._ranks)))

    def _broadcast(self, tensor: Tensor, source: int) -> None:
        looked_at = zlib.crc32(repr((source, tuple(tensor.shape), tensor.dtype)).encode())
        if not self._agreement.any_and_same([], looked_at)[1]:
            raise RuntimeError(
                f"pipeline: ranks that run a step together look at different values{here()}. Hooks of a block run where"
                " the block does, and what they collect (output_hidden_states of some models) is another list on each"
                " rank. Let the module return it, or use pipeline_parallel_size=1"
            )
        values = tensor.contiguous() if self._rank == source else torch.empty_like(tensor).contiguous()
        dist.broadcast(values, self._ranks[source], group=self._group)
        if self._rank != source:
            tensor.copy_(values)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._is_away or func in _SHAPES or func in _ATTRIBUTES:
            return func(*args, **kwargs)
        inputs = list(tensors_in((args, kwargs)))
        parameters = {self._partly_held[id(tensor)] for tensor in inputs if id(tensor) in self._partly_held}
        self.reveal(inputs)
        return self._on_holder(func, args, kwargs, parameters) if parameters else func(*args, **kwargs)

    def _on_holder(self, func: Any, args: Any, kwargs: Any, parameters: set[str]) -> Any:
        """A function of parameters that only some ranks hold; the result is everybody's."""
        able = set(range(len(self._ranks)))
        for name in parameters:
            able &= set(self._parameter_holders[name])
        if not able:
            raise RuntimeError(
                f"pipeline: parameters that no rank holds together are used in one function{here()}:"
                f" {', '.join(sorted(parameters))}. Use pipeline_parallel_size=1"
            )
        source = min(able)
        result = func(*args, **kwargs) if self._rank == source else None
        message = [Made.of(result, [], set()) if self._rank == source else None]
        dist.broadcast_object_list(message, self._ranks[source], group=self._control)
        if self._rank != source:
            assert message[0] is not None
            result, _ = message[0].filled([], self._device)
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._knowing.note(leaf, {source})
        self.reveal(result)
        return result

    def _bring(self, tensor: Tensor, to: int) -> None:
        """Let the rank at place ``to`` know the values of ``tensor``."""
        knowing = self._knowing.get(tensor)
        if knowing is None or to in knowing:
            return
        source = min(knowing)
        if self._rank == source:
            dist.send(tensor.contiguous(), self._ranks[to], group=self._group)
        elif self._rank == to:
            values = torch.empty_like(tensor).contiguous()
            with waiting_for(self._ranks[source]):
                dist.recv(values, self._ranks[source], group=self._group)
            tensor.copy_(values)
        knowing.add(to)

    def _receive(self, key: Any, owner: int, leaves: list[Any], name: str) -> Any:
        if key not in self._known:
            message: list[Any] = [None]
            dist.broadcast_object_list(message, self._ranks[owner], group=self._control)
            self._known[key] = message[0]
        (output, left), unknown = self._known[key].filled(leaves, self._device)
        for tensor in unknown:
            self._knowing.note(tensor, {owner})
        self._interception.keep(name, left)
        return output, left

    def _refuse_state(self, name: str, leaves: Sequence[Any]) -> None:
        """An object in which a block keeps something (a cache) would have it on that block's rank alone."""
        for leaf in leaves:
            if isinstance(leaf, (Tensor, *_PLAIN)) or not hasattr(leaf, "__dict__"):
                continue
            if (name, id(leaf)) in self._given:
                raise ValueError(
                    f"pipeline: '{name}' is given the same {type(leaf).__name__} in several calls of one step{here()},"
                    " and what blocks keep in it stays on their ranks. Do without (use_cache=False, say), or use"
                    " pipeline_parallel_size=1"
                )
            self._given[name, id(leaf)] = leaf


@dataclass(frozen=True)
class Made:
    """What a module made of its arguments, without the values of tensors.

    Attributes:
        leaves: of the tree, where tensors are only described.
        spec: of the tree.
        given: leaves that are leaves of the arguments: their positions there, and whether the module wrote to them.
    """

    leaves: tuple[Any, ...]
    spec: Spec
    given: Mapping[int, tuple[int, bool]]

    @classmethod
    def of(cls, tree: Any, arguments: Sequence[Any], changed: Set[int]) -> Made:
        """``changed``: identities of arguments that were written to."""
        leaves, spec = tree_flatten(tree)
        places = {id(leaf): place for place, leaf in enumerate(arguments) if not isinstance(leaf, _PLAIN)}
        given = {
            index: (places[id(leaf)], id(leaf) in changed) for index, leaf in enumerate(leaves) if id(leaf) in places
        }
        described = (
            None if index in given else TensorMeta.of(leaf) if isinstance(leaf, Tensor) else leaf
            for index, leaf in enumerate(leaves)
        )
        return cls(tuple(described), spec.without_tensors(), given)

    def filled(self, arguments: Sequence[Any], device: torch.device) -> tuple[Any, list[Tensor]]:
        """The tree, and those of its tensors that have no values yet."""
        leaves, unknown = [], []
        for index, leaf in enumerate(self.leaves):
            place, is_changed = self.given.get(index, (None, False))
            if place is not None:
                leaf = arguments[place]
            elif isinstance(leaf, TensorMeta):
                leaf = torch.empty(leaf.shape, dtype=leaf.dtype, device=device)
            if isinstance(leaf, Tensor) and (place is None or is_changed):
                unknown.append(leaf)
            leaves.append(leaf)
        return tree_unflatten(leaves, self.spec), unknown


def _version(tensor: Tensor) -> int | None:
    """How often it was written to; inference tensors do not tell."""
    return None if tensor.is_inference() else tensor._version
