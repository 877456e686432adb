"""One run of the step on placeholders: which blocks are called in which order, and what depends on what.

Every tensor that a block, a unit or a parameter had a part in is *tainted*: its value is only known on the stage that
computed it. The trace notes where tainted values are born and used, so that the plan can tell what crosses a boundary
between two blocks, and refuse what would have to cross it in another way than as an argument of the next block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, resolve_name

from lightning_effi.microbatches.logs import Logged
from lightning_effi.modules.trunk import Trunk
from lightning_effi.pipeline_parallel.intercept import Interception, TensorMeta
from lightning_effi.pipeline_parallel.tree import tree_leaves

_READS_VALUES = (Tensor.__bool__, Tensor.item, Tensor.tolist, Tensor.__int__, Tensor.__float__, Tensor.__index__)


@dataclass(frozen=True)
class Use:
    """A tainted value that exists before ``born`` + 1 blocks were called, used when ``at`` blocks had been."""

    value: int
    born: int
    at: int
    by: str
    origin: str = "a value"


@dataclass
class Trace:
    """What a step did.

    Attributes:
        blocks: names in calling order.
        units: for each unit, how many blocks had been called at each of its calls.
        parameters: for each parameter used outside of blocks and units, the same of its first use.
        arguments: for each block, the positions of its tainted arguments among the leaves of ``(args, kwargs)``.
        metas: for each block, shape and dtype of these.
        values: for each block, the identities of these.
        uses: tainted values used by anything but a block.
        block_uses: tainted values used as arguments of blocks.
        flops: of each block and unit.
        known: how many blocks the module has, called or not.
        shared: what keeps further repeated layers from being blocks.
        logged: for each call of ``self.log``, how many blocks had been called when a tainted value of it was computed.
    """

    blocks: list[str] = field(default_factory=list)
    units: dict[str, list[int]] = field(default_factory=dict)
    parameters: dict[str, int] = field(default_factory=dict)
    arguments: dict[str, tuple[int, ...]] = field(default_factory=dict)
    metas: dict[str, tuple[TensorMeta, ...]] = field(default_factory=dict)
    values: dict[str, frozenset[int]] = field(default_factory=dict)
    uses: list[Use] = field(default_factory=list)
    block_uses: list[Use] = field(default_factory=list)
    flops: dict[str, int] = field(default_factory=dict)
    known: int = 0
    shared: tuple[str, ...] = ()
    logged: list[int | None] = field(default_factory=list)


def trace_step(
    module: nn.Module,
    trunk: Trunk,
    interception: Interception,
    step: Callable[[], Any],
    logged: Sequence[Logged] = (),
) -> Trace:
    """Run ``step`` with placeholders for all blocks and units.

    Args:
        module: the user's.
        trunk: its blocks and units.
        interception: of these.
        step: what is traced.
        logged: where the step's calls of ``self.log`` are noted.

    Raises:
        ValueError: where a block is called twice, control flow before the last block depends on computed values, or a
            value leaves a block otherwise than by being returned.
    """
    tracer = _Tracer(trunk, interception, {id(p): name for name, p in module.named_parameters()})
    with tracer, interception.handled_by(tracer.call), interception.kept.unchanged():
        output = step()
    tracer.note_output(output)
    tracer.note_logged(logged)
    tracer.refuse_early_decisions()
    return tracer.trace


class _Tracer(TorchFunctionMode):
    def __init__(self, trunk: Trunk, interception: Interception, parameters: Mapping[int, str]) -> None:
        super().__init__()
        self.trace = Trace(known=len(trunk.blocks), shared=trunk.shared)
        self._blocks = frozenset(trunk.blocks)
        self._interception = interception
        self._parameters = parameters
        self._born: dict[int, int] = {}
        self._origins: dict[int, str] = {}
        self._alive: list[Tensor] = []  # an id names one tensor only as long as that lives
        self._decisions: list[tuple[int, str]] = []
        self._paused = False

    @property
    def _position(self) -> int:
        return len(self.trace.blocks)

    def call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A block or unit is called."""
        self._paused = True
        try:
            leaves = tree_leaves((args, kwargs))
            self._refuse_escaped(leaves, f"'{name}'")
            self._note_parameters(leaves)
            if name in self._blocks:
                self._call_block(name, leaves)
            else:
                self.trace.units.setdefault(name, []).append(self._position)
                self._note_uses(leaves, f"'{name}'")
            output = self._interception.placeholders(name, args, kwargs, fill=0.0)
            self.trace.flops[name] = self._interception.flops(name)
            self._taint(output)
            for attribute, value in self._interception.kept_by(name):
                self._taint(value, f"attribute '{attribute}' of '{name}'")
            return output
        finally:
            self._paused = False

    def note_output(self, output: Any) -> None:
        self._refuse_escaped(tree_leaves(output), "the output of the step")
        self._note_uses(tree_leaves(output), "the output of the step")

    def note_logged(self, logged: Sequence[Logged]) -> None:
        self.trace.logged = [self._born.get(id(call.value)) for call in logged]

    def refuse_early_decisions(self) -> None:
        for position, what in self._decisions:
            if position < self._position:
                raise ValueError(
                    f"pipeline: before '{self.trace.blocks[position]}' is called, the step reads a value that the model"
                    f" computed ({what}), which only one stage knows. Use pipeline_parallel_size=1"
                )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._paused:
            return func(*args, **kwargs)
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        self._refuse_escaped(inputs, resolve_name(func) or str(func))
        result = func(*args, **kwargs)
        tainted = any(id(tensor) in self._born for tensor in inputs)
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if tainted and func in _READS_VALUES:
            self._decisions.append((self._position, resolve_name(func) or str(func)))
        if not outputs:  # a shape, a dtype
            return result
        if self._note_parameters(inputs) or tainted:
            self._note_uses(inputs, resolve_name(func) or str(func))
            self._taint(outputs)
        return result

    def _call_block(self, name: str, leaves: list[Any]) -> None:
        if name in self.trace.arguments:
            raise ValueError(
                f"pipeline: '{name}' is called twice in one step, and a stage runs each of its blocks once. Use"
                " pipeline_parallel_size=1"
            )
        tainted = [i for i, leaf in enumerate(leaves) if id(leaf) in self._born and isinstance(leaf, Tensor)]
        self.trace.arguments[name] = tuple(tainted)
        self.trace.metas[name] = tuple(TensorMeta.of(leaves[i]) for i in tainted)
        self.trace.values[name] = frozenset(id(leaves[i]) for i in tainted)
        self.trace.block_uses += [Use(id(leaves[i]), self._born[id(leaves[i])], self._position, f"'{name}'")
                                  for i in tainted]  # fmt: skip
        self.trace.blocks.append(name)

    def _note_parameters(self, leaves: list[Any]) -> bool:
        """Whether parameters are among them, which stages need that only hand them to a module, too."""
        names = [self._parameters[id(leaf)] for leaf in leaves if id(leaf) in self._parameters]
        for name in names:
            self.trace.parameters.setdefault(name, self._position)
        return bool(names)

    def _note_uses(self, leaves: list[Any], by: str) -> None:
        for leaf in leaves:
            if isinstance(leaf, Tensor) and id(leaf) in self._born:
                origin = self._origins.get(id(leaf), "a value")
                self.trace.uses.append(Use(id(leaf), self._born[id(leaf)], self._position, by, origin))

    def _taint(self, tree: Any, origin: str | None = None) -> None:
        for leaf in tree_leaves(tree):
            if isinstance(leaf, Tensor):
                self._born[id(leaf)] = self._position
                self._alive.append(leaf)
                if origin is not None:
                    self._origins[id(leaf)] = origin

    def _refuse_escaped(self, leaves: list[Any], by: str) -> None:
        """A block's copy, run for its shapes, has handed a tensor to somebody else than its caller."""
        for leaf in leaves:
            name = self._interception.computed_by(leaf)
            if name is not None:
                raise ValueError(
                    f"pipeline: a value computed inside '{name}', which a hook or a list kept, is used outside of it by"
                    f" {by}. It cannot reach another stage: let '{name}' return it and hand it on to the next block, or"
                    " use pipeline_parallel_size=1"
                )
