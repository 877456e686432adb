"""Which linear layers of a block feed which: found by running it once on real inputs.

The tracer follows each tensor back to where it came from: the block's input, or linear layers. A layer whose input
derives from other layers alone (through attention, activations, norms of single heads) can be split by rows if those
are split by columns, and nothing needs to be sent in between.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from lightning_effi.tensor.linear import in_features, linears, out_features

INPUT = "<input>"
_NO_VALUE = frozenset({"__get__", "size", "dim", "numel", "__len__", "is_contiguous", "stride"})


@dataclass
class Trace:
    """What a run of a block showed.

    Attributes:
        inputs: for each linear layer, what its input derives from: names of layers, and ``INPUT``.
        outputs: what the block's result derives from without another layer in between.
        pieces: for each layer whose output is cut up at once (packed projections), the sizes of the pieces.
    """

    inputs: dict[str, frozenset[str]] = field(default_factory=dict)
    outputs: frozenset[str] = frozenset()
    pieces: dict[str, tuple[int, ...]] = field(default_factory=dict)


def trace_block(block: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> Trace:
    """Run ``block`` on its inputs, without gradients, and note where values go."""
    tracer = _Tracer(linears(block))
    tracer.mark_inputs([*args, *kwargs.values()])
    with torch.no_grad(), tracer.watching(), tracer:
        output = block(*args, **kwargs)
    tracer.trace.outputs = tracer.sources_of(output)
    return tracer.trace


class _Tracer(TorchFunctionMode):
    def __init__(self, layers: dict[str, nn.Module]) -> None:
        super().__init__()
        self.trace = Trace()
        self._layers = layers
        self._sources: dict[int, frozenset[str]] = {}
        self._direct: dict[int, frozenset[str]] = {}
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
        self._follow_pieces(name, args, output)
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
        self._direct[id(output)] = frozenset({name})

    def _follow_pieces(self, name: str, args: Any, output: Any) -> None:
        """Look at what first happens to a layer's output; an adapter's contribution may be added before."""
        direct = [t for t in tree_leaves(args) if isinstance(t, Tensor) and id(t) in self._direct]
        if not direct:
            return
        layers: frozenset[str] = frozenset().union(*(self._direct[id(t)] for t in direct))
        source = direct[0]
        if isinstance(output, Tensor) and output.shape == source.shape:
            self._direct[id(output)] = layers
            return
        for layer in layers:
            pieces = _pieces(name, source, args, output, out_features(self._layers[layer]))
            if pieces:
                known = self.trace.pieces.get(layer)
                self.trace.pieces[layer] = _refined(known, pieces) if known else pieces


def _pieces(name: str, source: Tensor, args: Any, output: Any, width: int) -> tuple[int, ...]:
    """Sizes into which a function cuts the last dim of a layer's output; empty where it does not."""
    if name in ("split", "chunk", "tensor_split", "split_with_sizes"):
        sizes = tuple(part.shape[-1] for part in output)
        return sizes if sum(sizes) == width else ()
    if name == "__getitem__" and isinstance(args[1], tuple) and args[1][0] is Ellipsis and len(args[1]) == 2:
        entry = args[1][1]
        if isinstance(entry, slice) and entry.step in (None, 1):
            start, stop, _ = entry.indices(width)
            return tuple(n for n in (start, stop - start, width - stop) if n > 0)
    if name in ("view", "reshape", "unflatten") and isinstance(output, Tensor):
        added = output.shape[source.dim() - 1 :]
        if len(added) >= 3 and output.shape[: source.dim() - 1] == source.shape[:-1] and added[0] in (2, 3):
            return (width // added[0],) * added[0]
    return ()


def _refined(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    """The pieces between the ends of both."""
    ends = sorted({sum(a[: i + 1]) for i in range(len(a))} | {sum(b[: i + 1]) for i in range(len(b))})
    return tuple(end - start for start, end in zip([0, *ends], ends, strict=False))
