"""Matrix products of activations: queries with keys, weights with values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_effi.tensor_parallel.collectives import reduce
from lightning_effi.tensor_parallel.rules.elementwise import elementwise, merged
from lightning_effi.tensor_parallel.rules.layers import layer
from lightning_effi.tensor_parallel.rules.wholes import run_on_wholes
from lightning_effi.tensor_parallel.split import Split, SplitTensor, aligned, split_tensors, wrap

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


def matmul(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """Batch dims split alike stay split; a split row or column dim stays, a split inner dim is summed up."""
    left, right = (*args, *kwargs.values())[:2]
    if func.__name__ in ("__rmatmul__",):
        left, right = right, left
    if isinstance(left, SplitTensor) and hasattr(right, "device_mesh") and right.dim() == 2:
        return layer(left, right, None, out_dim=1, product=torch.matmul)  # ``x @ self.weight.T``
    cut = [t for t in split_tensors(left, right) if t.placement.dim is not None]
    if not cut or left.dim() < 2 or right.dim() < 2 or len(args) + len(kwargs) > 2:
        return run_on_wholes(func, args, kwargs)
    split = merged(cut)
    dims = max(left.dim(), right.dim())
    places = {_from_right(t) for t in cut}
    if len(places) == 1 and min(places) > 2 and len({t.placement.pieces for t in cut}) == 1:  # heads
        [place] = places
        output = torch.matmul(aligned(left, split, place), aligned(right, split, place))
        return wrap(output, split.at(dims - place))
    if len(cut) == 1:
        [place] = places
        if cut[0] is left and place == 2:  # rows
            return wrap(torch.matmul(left, aligned(right, split, dims + 1)), split.at(dims - 2))
        if cut[0] is right and place == 1:  # columns
            return wrap(torch.matmul(aligned(left, split, dims + 1), right), split.at(dims - 1))
        if cut[0] is left and place == 1:
            return reduce(torch.matmul(left.as_subclass(Tensor), aligned(right, split, 2)), split.group)
    if len(cut) == 2 and _from_right(left) == 1 and _from_right(right) == 2 and split.pieces == right.placement.pieces:
        return reduce(torch.matmul(left.as_subclass(Tensor), right.as_subclass(Tensor)), split.group)
    return run_on_wholes(func, args, kwargs)


def baddbmm(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """``beta * input + alpha * (batch1 @ batch2)``, as its two operations."""
    names = ("input", "batch1", "batch2")
    given = dict(zip(names, args, strict=False)) | {"beta": 1, "alpha": 1} | kwargs
    product = matmul(torch.bmm, (given["batch1"], given["batch2"]), {})
    scaled = (
        elementwise(torch.mul, (product, given["alpha"]), {})
        if isinstance(product, SplitTensor)
        else (product * given["alpha"])
    )
    if not given["beta"]:
        return scaled
    summand = given["input"]
    operands = (scaled, summand)
    if not split_tensors(operands):
        return torch.add(scaled, summand * given["beta"])
    weighted = (
        elementwise(torch.mul, (summand, given["beta"]), {})
        if isinstance(summand, SplitTensor)
        else (summand * given["beta"])
    )
    return elementwise(torch.add, (scaled, weighted), {})


def einsum(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """One letter is split: it stays split if it is in the output, and is summed over the ranks otherwise."""
    equation, *operands = args
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = list(operands[0])
    if not isinstance(equation, str) or "." in equation or "->" not in equation or len(operands) != 2:
        return run_on_wholes(func, args, kwargs)
    inputs, _, output = equation.replace(" ", "").partition("->")
    letters = inputs.split(",")
    cut = [(t, term[t.placement.dim]) for t, term in zip(operands, letters, strict=True)
           if isinstance(t, SplitTensor) and t.placement.dim is not None]  # fmt: skip
    if not cut or len({letter for _, letter in cut}) > 1 or len({t.placement.pieces for t, _ in cut}) > 1:
        return run_on_wholes(func, args, kwargs)
    letter, split = cut[0][1], merged([t for t, _ in cut])
    fitted = [
        aligned(t, split, len(term) - term.index(letter) if letter in term else len(term) + 1)
        for t, term in zip(operands, letters, strict=True)
    ]
    result = torch.einsum(equation, *fitted)
    if letter in output:
        return wrap(result, split.at(output.index(letter)))
    if not all(letter in term for term in letters):
        return run_on_wholes(func, args, kwargs)
    return reduce(result.as_subclass(Tensor), split.group)


def _from_right(tensor: SplitTensor) -> int:
    split: Split = tensor.placement
    assert split.dim is not None
    return tensor.dim() - split.dim


RULES: dict[str, Any] = {
    "matmul": matmul, "__matmul__": matmul, "__rmatmul__": matmul, "bmm": matmul, "mm": matmul, "einsum": einsum,
    "baddbmm": baddbmm,
}  # fmt: skip
