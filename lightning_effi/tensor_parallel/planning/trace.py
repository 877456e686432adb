"""Which linear layers of a block feed which: found by running it once on real inputs.

The tracer follows each tensor back to where it came from: the block's input, or linear layers. A layer whose input
derives from other layers alone (through attention, activations, norms of single heads) can be split by rows if those
are split by columns, and nothing needs to be sent in between.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from lightning_effi.tensor_parallel.layers.linear import in_features, linears, out_features

INPUT = "<input>"
_ORDERS = frozenset({"transpose", "swapaxes", "swapdims", "permute", "movedim", "moveaxis", "unsqueeze"})
_NO_VALUE = frozenset({"__get__", "size", "dim", "numel", "__len__", "is_contiguous", "stride"})


@dataclass
class Trace:
    """What a run of a block showed.

    Attributes:
        inputs: for each linear layer, what its input derives from: names of layers, and ``INPUT``.
        outputs: for each tensor of the block's result, what it derives from without another layer in between.
        pieces: for each layer whose output is cut up at once (packed projections), the sizes of the pieces.
    """

    inputs: dict[str, frozenset[str]] = field(default_factory=dict)
    outputs: tuple[frozenset[str], ...] = ()
    pieces: dict[str, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class _Packed:
    """A tensor that holds outputs of layers from number ``start`` on, along ``dim``: ``unit`` of them at each place."""

    layers: frozenset[str]
    dim: int
    start: int = 0
    unit: int = 1


def trace_block(block: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> Trace:
    """Run ``block`` on its inputs, without gradients, and note where values go."""
    tracer = _Tracer(linears(block))
    tracer.mark_inputs([*args, *kwargs.values()])
    with torch.no_grad(), tracer.watching(), tracer:
        output = block(*args, **kwargs)
    tracer.trace.outputs = tuple(tracer.sources_of(leaf) for leaf in tree_leaves(output) if isinstance(leaf, Tensor))
    return tracer.trace


class _Tracer(TorchFunctionMode):
    def __init__(self, layers: dict[str, nn.Module]) -> None:
        super().__init__()
        self.trace = Trace()
        self._layers = layers
        self._sources: dict[int, frozenset[str]] = {}
        self._packed: dict[int, _Packed] = {}
        self._alive: list[Tensor] = []  # ids are only unique among living tensors
        self._inside = 0

    def mark_inputs(self, values: Sequence[Any]) -> None:
        """Hidden states are what linear layers could be fed with; masks and rotary tables are not traced."""
        widths = {in_features(layer) for layer in self._layers.values()}
        floating = [t for t in tree_leaves(values) if isinstance(t, Tensor) and t.is_floating_point()]
        for index, tensor in enumerate(floating):
            if index == 0 or tensor.requires_grad or (tensor.dim() == 3 and tensor.shape[-1] in widths):
                self._note(tensor, frozenset({INPUT}))

    def sources_of(self, *values: Any) -> frozenset[str]:
        """What the tensors in ``values`` derive from."""
        found: frozenset[str] = frozenset()
        for leaf in tree_leaves(values):
            if isinstance(leaf, Tensor):
                found |= self._sources.get(id(leaf), frozenset())
        return found

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, each linear layer is one step of the trace."""
        handles: list[Any] = []
        try:
            for name, layer in self._layers.items():
                handles.append(layer.register_forward_pre_hook(partial(self._enter, name)))
                handles.append(layer.register_forward_hook(partial(self._leave, name)))
            yield
        finally:
            for handle in handles:
                handle.remove()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if self._inside or (name in _NO_VALUE and not isinstance(output, Tensor)):
            return output
        given = {id(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        sources = self.sources_of(args, kwargs)
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and id(leaf) not in given:
                self._note(leaf, sources)
        self._follow_pieces(func, args, kwargs, output)
        return output

    def _note(self, tensor: Tensor, sources: frozenset[str]) -> None:
        self._sources[id(tensor)] = sources
        self._alive.append(tensor)

    def _enter(self, name: str, _layer: nn.Module, args: Any) -> None:
        known = self.trace.inputs.get(name, frozenset())
        self.trace.inputs[name] = known | self.sources_of(args)
        self._inside += 1

    def _leave(self, name: str, _layer: nn.Module, _args: Any, output: Tensor) -> None:
        self._inside -= 1
        self._note(output, frozenset({name}))
        self._packed[id(output)] = _Packed(frozenset({name}), output.dim() - 1)

    def _follow_pieces(self, func: Any, args: Any, kwargs: Any, output: Any) -> None:
        """Look at how a layer's output is cut up; an adapter's contribution may be added before."""
        followed = [t for t in tree_leaves(args) if isinstance(t, Tensor) and id(t) in self._packed]
        if not followed:
            return
        source = followed[0]
        layers = frozenset[str]().union(*(self._packed[id(t)].layers for t in followed))
        packed = replace(self._packed[id(source)], layers=layers)
        lengths, parts = _cut(func, source, args, kwargs, output, packed.dim)
        if lengths:
            self._note_pieces(packed, lengths)
            for start, part in parts:
                self._packed[id(part)] = replace(packed, start=packed.start + start * packed.unit)
        elif isinstance(output, Tensor):
            place = _moved(func, source, args, kwargs, output, packed)
            if place is not None:
                self._packed[id(output)] = place

    def _note_pieces(self, packed: _Packed, lengths: Sequence[int]) -> None:
        for layer in packed.layers:
            sizes = [packed.start, *(length * packed.unit for length in lengths)]
            pieces = tuple(n for n in (*sizes, out_features(self._layers[layer]) - sum(sizes)) if n > 0)
            known = self.trace.pieces.get(layer)
            self.trace.pieces[layer] = _refined(known, pieces) if known else pieces


def _cut(
    func: Any, source: Tensor, args: Any, kwargs: Any, output: Any, dim: int
) -> tuple[list[int], list[tuple[int, Tensor]]]:
    """The lengths into which a function cuts ``dim``; empty where it does something else.

    Then the parts that still have that dim, each with its start.
    """
    name, extent = getattr(func, "__name__", ""), source.shape[dim]
    entry: Any = None
    if name in ("split", "chunk", "tensor_split", "split_with_sizes"):
        lengths = [part.shape[dim] for part in output]
        if len(lengths) == 1 or sum(lengths) != extent:  # along another dim
            return [], []
        return lengths, [(sum(lengths[:index]), part) for index, part in enumerate(output)]
    if name == "glu":
        along = args[1] if len(args) > 1 else kwargs.get("dim", -1)
        return ([extent // 2] * 2, []) if along % source.dim() == dim else ([], [])
    if name == "unbind":
        along = args[1] if len(args) > 1 else kwargs.get("dim", 0)
        return ([1] * extent, []) if along % source.dim() == dim else ([], [])
    if name in ("select", "narrow"):
        given = [kwargs[key] for key in ("dim", "index", "start", "length") if key in kwargs]
        along, start, *length = [*tuple(args)[1:], *given]
        if along % source.dim() == dim:
            entry = slice(start, start + length[0]) if length else start
    elif name == "__getitem__":
        entry = _entry_at(args[1], source.dim(), dim)
    if type(entry) is int:
        entry %= extent
        return [entry, 1, extent - entry - 1], []
    if isinstance(entry, slice) and entry.step in (None, 1):
        start, stop, _ = entry.indices(extent)
        if (start, stop) != (0, extent):
            parts = [(start, output)] if output.dim() == source.dim() else []
            return [start, stop - start, extent - stop], parts
    return [], []


def _entry_at(index: Any, dims: int, dim: int) -> Any:
    """What an index takes of ``dim``; ``None`` where it consists of more than integers and slices."""
    entries = index if isinstance(index, tuple) else (index,)
    if not all(entry is Ellipsis or isinstance(entry, slice) or type(entry) is int for entry in entries):
        return None
    if Ellipsis in entries:
        at = entries.index(Ellipsis)
        entries = (*entries[:at], *[slice(None)] * (dims - len(entries) + 1), *entries[at + 1 :])
    return entries[dim] if dim < len(entries) else None


def _moved(func: Any, source: Tensor, args: Any, kwargs: Any, output: Tensor, packed: _Packed) -> _Packed | None:
    """Where the packed dim is found in what a function made of ``source``; ``None`` where that cannot be told."""
    name, dim = getattr(func, "__name__", ""), packed.dim
    if name in _ORDERS:
        # each dim has another size here, which tells where it went
        marked = torch.empty(tuple(range(2, source.dim() + 2)), device="meta")
        return replace(packed, dim=list(func(marked, *args[1:], **kwargs).shape).index(dim + 2))
    if output.shape[: dim + 1] == source.shape[: dim + 1] and (
        output.dim() == source.dim() or name in ("view", "reshape", "flatten", "unflatten")
    ):
        return packed
    behind = source.dim() - dim - 1
    added = output.shape[dim : output.dim() - behind]
    if name in ("view", "reshape", "unflatten") and output.shape[:dim] == source.shape[:dim] and len(added) > 1:
        return replace(packed, unit=packed.unit * source.shape[dim] // added[0])
    return None


def _refined(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    """The pieces between the ends of both."""
    ends = sorted({sum(a[: i + 1]) for i in range(len(a))} | {sum(b[: i + 1]) for i in range(len(b))})
    return tuple(end - start for start, end in zip([0, *ends], ends, strict=False))
