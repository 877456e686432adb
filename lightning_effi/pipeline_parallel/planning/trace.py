"""The observed run of the step by the whole module: which blocks are called in which order, and what depends on what.

Every tensor that a block, a unit or a parameter had a part in is *tainted*: its value is only known on the stage that
computed it. The trace notes where tainted values are born and used, so that the plan can tell what crosses a boundary
between two blocks, and refuse what would have to cross it in another way than as an argument of the next block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, resolve_name

from lightning_effi.modules.trunk import Trunk
from lightning_effi.modules.user_code import here
from lightning_effi.pipeline_parallel.intercept import Interception
from lightning_effi.pipeline_parallel.origins import DECISIONS, READS, Origins, guards, is_check_of_torch, tensors_in
from lightning_effi.pipeline_parallel.stand_ins import TensorMeta
from lightning_effi.pipeline_parallel.tree import tree_leaves, tree_map
from lightning_effi.sharded_tensors.names import is_in_place

Run = Callable[[str, tuple[Any, ...], dict[str, Any]], tuple[Any, list[Any], int]]
"""Runs a block or unit; returns its output, what it left in attributes, and its floating-point operations."""


@dataclass(frozen=True)
class Use:
    """A tainted value that exists before ``born`` + 1 blocks were called, used when ``at`` blocks had been.

    Attributes:
        value: its number in the run.
        by: which function or module used it.
        origin: what it is, for messages.
        line: of the user's code, where it was used.
    """

    value: int
    born: int
    at: int
    by: str
    origin: str = "a value"
    line: str = ""


@dataclass
class Trace:
    """What a step did.

    Attributes:
        blocks: names in calling order.
        units: for each unit, how many blocks had been called at each of its calls.
        parameters: for each parameter used outside of blocks and units, the same of its first use.
        arguments: for each block, the positions of its tainted arguments among the leaves of ``(args, kwargs)``.
        metas: for each block, shape and dtype of these.
        values: for each block, the numbers of these.
        uses: tainted values used by anything but a block.
        block_uses: tainted values used as arguments of blocks.
        flops: of each block and unit.
        known: how many blocks the module has, called or not.
        refused: why stages cannot run the step one after the other, in a trace of which that is not an error.
        shared: what keeps further repeated layers from being blocks.
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
    refused: str | None = None
    shared: tuple[str, ...] = ()


def trace_step(
    module: nn.Module,
    trunk: Trunk,
    interception: Interception,
    step: Callable[[], Any],
    run: Run | None = None,
    is_tolerant: bool = False,
) -> tuple[Trace, Any]:
    """Run ``step`` and look on; returns what was seen, and the step's output.

    Args:
        module: the user's, whole.
        trunk: its blocks and units.
        interception: of these, installed.
        step: what is traced.
        run: how blocks and units are run; ``None``: here, noting what stand-ins for their outputs must look like.
        is_tolerant: whether what would be an error is noted only.

    Raises:
        ValueError: where a block is called twice, control flow before the last block depends on computed values, or a
            value leaves a block otherwise than by being returned.
    """
    parameters = {id(p): name for name, p in module.named_parameters()}
    tracer = _Tracer(trunk, interception, parameters, run or interception.observe, is_tolerant)
    with tracer, interception.handled_by(tracer.call):
        output = step()
    tracer.note_output(output)
    tracer.refuse_early_decisions()
    return tracer.trace, output


@dataclass(frozen=True)
class _Value:
    """A tainted value.

    Attributes:
        number: of the value in the run.
        born: how many blocks had been called.
        origin: what it is, for messages.
        is_guard: whether it only tells that values have gone wrong.
    """

    number: int
    born: int
    origin: str = "a value"
    is_guard: bool = False


class _Tracer(TorchFunctionMode):
    def __init__(
        self,
        trunk: Trunk,
        interception: Interception,
        parameters: Mapping[int, str],
        run: Run,
        is_tolerant: bool,
    ) -> None:
        super().__init__()
        self._run, self._is_tolerant = run, is_tolerant
        self.trace = Trace(known=len(trunk.blocks), shared=trunk.shared)
        self._blocks = frozenset(trunk.blocks)
        self._interception = interception
        self._parameters = parameters
        self._values: Origins[_Value] = Origins()
        self._inner: Origins[str] = Origins()  # by the block or unit inside of which a tensor was computed
        self._count = 0
        self._decisions: list[tuple[int, str]] = []
        self._inside: str | None = None

    @property
    def _position(self) -> int:
        return len(self.trace.blocks)

    def call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A block or unit is called."""
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        self._refuse_escaped(given, f"'{name}'")
        self._note_parameters(given)
        if name in self._blocks:
            self._call_block(name, tree_leaves((args, kwargs)))
        else:
            self.trace.units.setdefault(name, []).append(self._position)
            self._note_uses(given, f"'{name}'")
        versions = [_version(tensor) for tensor in given]
        self._inside = name
        try:
            output, left, self.trace.flops[name] = self._run(name, args, kwargs)
            identities = {id(tensor) for tensor in given}
            # what is handed through is another value from here on, as it is for the next stage
            output = tree_map(lambda leaf: leaf.view_as(leaf) if id(leaf) in identities else leaf, output)
        finally:
            self._inside = None
        self._taint([tensor for tensor, old in zip(given, versions, strict=True) if _version(tensor) != old], "a value")
        self._taint(output, "a value")
        for (attribute, _), value in zip(self._interception.kept_by(name), left, strict=True):
            self._taint(value, f"attribute '{attribute}' of '{name}'")
        return output

    def note_output(self, output: Any) -> None:
        leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        self._refuse_escaped(leaves, "the output of the step")
        self._note_uses(leaves, "the output of the step")

    def refuse_early_decisions(self) -> None:
        for position, what in self._decisions:
            if position < self._position:
                self._refuse(
                    f"pipeline: before '{self.trace.blocks[position]}' is called, the step reads a value that the model"
                    f" computed ({what}), which only one stage knows. Use pipeline_parallel_size=1"
                )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._inside is not None:
            result = func(*args, **kwargs)
            for tensor in tensors_in((result,)):
                self._inner.note(tensor, self._inside)
            return result
        by = resolve_name(func) or str(func)
        inputs = list(tensors_in((args, kwargs)))
        self._refuse_escaped(inputs, by)
        values = [value for tensor in inputs if (value := self._values.get(tensor)) is not None]
        if values and func in READS | DECISIONS:
            self._note_uses(inputs, by)
            if func in READS or not (all(value.is_guard for value in values) or is_check_of_torch()):
                self._decisions.append((self._position, f"{by}{here()}"))
        result = func(*args, **kwargs)
        outputs = list(tensors_in((result,)))
        writes = is_in_place(getattr(func, "__name__", "")) and bool(args) and isinstance(args[0], Tensor)
        if not outputs and not writes:  # a shape, a dtype
            return result
        if self._note_parameters(inputs) or values:
            self._note_uses(inputs, by)
            is_guard = guards(func, bool(values) and all(value.is_guard for value in values))
            for tensor in outputs:
                self._values.note(tensor, self._new_value("a value", is_guard))
            if writes:
                self._values.note_write(args[0], self._new_value("a value", is_guard))
        return result

    def _call_block(self, name: str, leaves: list[Any]) -> None:
        if name in self.trace.arguments:
            self._refuse(
                f"pipeline: '{name}' is called twice in one step{here()}, and a stage runs each of its blocks once. Use"
                " pipeline_parallel_size=1"
            )
        found = {
            index: value
            for index, leaf in enumerate(leaves)
            if isinstance(leaf, Tensor) and (value := self._values.get(leaf)) is not None
        }
        self.trace.arguments[name] = tuple(found)
        self.trace.metas[name] = tuple(TensorMeta.of(leaves[index]) for index in found)
        self.trace.values[name] = frozenset(value.number for value in found.values())
        line = here()
        self.trace.block_uses += [
            Use(value.number, value.born, self._position, f"'{name}'", value.origin, line) for value in found.values()
        ]
        self.trace.blocks.append(name)

    def _refuse(self, reason: str) -> None:
        if not self._is_tolerant:
            raise ValueError(reason)
        self.trace.refused = self.trace.refused or reason

    def _note_parameters(self, tensors: list[Tensor]) -> bool:
        """Whether parameters are among them, which stages need that only hand them to a module, too."""
        names = [self._parameters[id(tensor)] for tensor in tensors if id(tensor) in self._parameters]
        for name in names:
            self.trace.parameters.setdefault(name, self._position)
        return bool(names)

    def _note_uses(self, tensors: list[Tensor], by: str) -> None:
        values = [value for tensor in tensors if (value := self._values.get(tensor)) is not None]
        line = here() if any(value.born < self._position for value in values) else ""
        self.trace.uses += [Use(v.number, v.born, self._position, by, v.origin, line) for v in values]

    def _taint(self, tree: Any, origin: str) -> None:
        for leaf in tree_leaves(tree):
            if isinstance(leaf, Tensor):
                self._values.note(leaf, self._new_value(origin))

    def _new_value(self, origin: str, is_guard: bool = False) -> _Value:
        self._count += 1
        return _Value(self._count, self._position, origin, is_guard)

    def _refuse_escaped(self, tensors: list[Tensor], by: str) -> None:
        """Something was computed inside a block and handed to somebody else than its caller."""
        for tensor in tensors:
            name = self._inner.get(tensor)
            if name is not None and self._values.get(tensor) is None:
                self._refuse(
                    f"pipeline: a value computed inside '{name}', which a hook or a list kept, is used outside of it by"
                    f" {by}{here()}. It cannot reach another stage: let '{name}' return it and hand it on to the next"
                    " block, or use pipeline_parallel_size=1"
                )


def _version(tensor: Tensor) -> int:
    """How often it was written to."""
    return 0 if tensor.is_inference() else tensor._version
