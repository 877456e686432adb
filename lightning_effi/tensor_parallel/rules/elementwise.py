"""Functions that treat each element alike, with broadcasting."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from lightning_effi.sharded_tensors.names import is_in_place
from lightning_effi.tensor_parallel.rules.wholes import run_on_wholes
from lightning_effi.tensor_parallel.split import Split, SplitTensor, aligned, split_tensors, wrap

# fmt: off
_NAMES = """
    abs absolute neg negative positive exp expm1 log log1p log2 sqrt rsqrt square sin cos tan tanh sinh cosh asin acos
    atan sigmoid logsigmoid erf erfc relu relu6 leaky_relu gelu silu mish elu selu celu softplus softsign hardtanh
    hardswish hardsigmoid threshold tanhshrink reciprocal sign round floor ceil trunc nan_to_num clamp clamp_min
    clamp_max clip isnan isinf isfinite logical_not bitwise_not
    add sub subtract rsub mul multiply div divide true_divide floor_divide fmod remainder pow float_power maximum
    minimum fmax fmin atan2 lerp addcmul addcdiv where masked_fill eq ne gt ge lt le logical_and logical_or logical_xor
    bitwise_and bitwise_or
    __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __rdiv__ __div__ __floordiv__ __pow__
    __rpow__ __mod__ __neg__ __pos__ __abs__ __invert__ __eq__ __ne__ __gt__ __ge__ __lt__ __le__ __and__ __or__ __xor__
    __rand__ __ror__ __iadd__ __isub__ __imul__ __itruediv__ __idiv__
    add_ sub_ mul_ div_ neg_ exp_ sigmoid_ tanh_ relu_ clamp_ clamp_min_ clamp_max_ masked_fill_ zero_ fill_ copy_
    type float double half bfloat16 bool int long contiguous clone detach cpu cuda
    zeros_like ones_like full_like empty_like alias
""".split()  # noqa: SIM905
# fmt: on


def elementwise(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Operands meet by broadcasting; replicated ones are cut or shared to fit."""
    operands = split_tensors(args, kwargs)
    cut = [t for t in operands if t.placement.dim is not None]
    if not cut:
        return _rewrapped(func(*args, **kwargs), operands[0].placement, args)
    first = cut[0]
    name = getattr(func, "__name__", "")
    # a part of what is whole would be written to a copy of it, which nobody keeps
    if is_in_place(name) and not any(args[0] is t for t in cut):
        return run_on_wholes(func, args, kwargs)
    split = merged(cut)
    from_right = _from_right(first)
    if any(_from_right(t) != from_right or t.placement.pieces != split.pieces for t in cut):
        return run_on_wholes(func, args, kwargs)

    def fit(leaf: Any) -> Any:
        return aligned(leaf, split, from_right) if isinstance(leaf, Tensor) else leaf

    output = func(*tree_map(fit, args), **tree_map(fit, kwargs))
    if not isinstance(output, Tensor):  # ``x.type()``
        return output
    if split.yields and first.dtype == torch.float64 and output.dtype == torch.float32:
        # transformers computes losses in fp32 in fp64 runs too: what torch makes of whole logits has other last bits
        # than a sum over ranks, and there a difference of 1e-8 is one
        return run_on_wholes(func, args, kwargs)
    return _rewrapped(output, split.at(output.dim() - from_right), args)


def conversion(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``x.to(...)``, ``x.type_as(y)``: of another tensor only the type is asked."""
    if not any(isinstance(value, Tensor) for value in (*args[1:], *kwargs.values())):
        return elementwise(func, args, kwargs)
    converted = func(*tree_map(_local, args), **tree_map(_local, kwargs))
    return wrap(converted, args[0].placement) if isinstance(args[0], SplitTensor) else converted


def _local(leaf: Any) -> Any:
    return leaf.as_subclass(Tensor) if isinstance(leaf, SplitTensor) else leaf


def merged(operands: list[SplitTensor]) -> Split:
    """The split of the first operand, with the sources of all."""
    sources = frozenset().union(*(t.placement.sources for t in operands))
    return replace(operands[0].placement, sources=sources, column=None, partial=False)


def _from_right(tensor: SplitTensor) -> int:
    assert tensor.placement.dim is not None
    return tensor.dim() - tensor.placement.dim


def _rewrapped(output: Any, split: Split, args: tuple[Any, ...]) -> Any:
    if not isinstance(output, torch.Tensor) or any(output is arg for arg in args):
        return output  # in place: the very tensor that was given
    return wrap(output, split)


RULES: dict[str, Any] = dict.fromkeys(_NAMES, elementwise) | dict.fromkeys(["to", "type_as"], conversion)
