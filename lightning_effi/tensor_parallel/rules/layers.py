"""Linear layers: column-wise, row-wise, and whole ones that meet split activations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_effi.tensor_parallel.collectives import TensorGroup, contribute, exchange, reduce, share, share_all, take
from lightning_effi.tensor_parallel.rules.wholes import run_on_wholes
from lightning_effi.tensor_parallel.split import CannotSplitError, Column, Split, SplitTensor, wrap

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


def linear(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """``F.linear(input, weight [out, in], bias)``."""
    given = dict(zip(("input", "weight", "bias"), args, strict=False)) | kwargs
    return layer(given["input"], given["weight"], given.get("bias"), out_dim=0, product=_linear)


def addmm(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """``torch.addmm(bias, input, weight [in, out])``, as Hugging Face's Conv1D writes it."""
    if len(args) != 3 or kwargs or not isinstance(args[1], SplitTensor):
        return run_on_wholes(func, args, kwargs)
    bias, tensor, weight = args
    return layer(tensor, weight, bias, out_dim=1, product=torch.matmul)


def _linear(tensor: Tensor, weight: Tensor) -> Tensor:
    return F.linear(tensor, weight)


def layer(tensor: Any, weight: Any, bias: Any, *, out_dim: int, product: Callable[[Tensor, Tensor], Tensor]) -> Any:
    """A linear layer whose weight holds its outputs in ``out_dim``, and ``product(input, weight)``."""
    if not isinstance(tensor, SplitTensor):
        raise CannotSplitError("a weight was computed from split activations", frozenset())
    split = tensor.placement
    last = tensor.dim() - 1
    if split.dim is None:
        return _column(tensor, weight, bias, split, out_dim, product)
    if split.dim != last:  # a whole layer applied to each head
        if bias is None:
            return wrap(product(tensor, share(_plain(weight, split), split.group)), split)
        weight, bias = share_all([_plain(weight, split), _plain(bias, split)], split.group)
        return wrap(product(tensor, weight) + bias, split)
    if hasattr(weight, "device_mesh"):
        if not split.is_even:
            raise CannotSplitError("the input of a row-wise layer consists of parts of different sizes", split.sources)
        local = weight.to_local()
        if not split.is_contiguous:
            local = exchange(local, 1 - out_dim, split.pieces, split.group)
    else:
        local = take(weight, 1 - out_dim, split.pieces, split.group)
    summand = product(tensor.as_subclass(Tensor), local)
    if split.partial:
        summand = summand if bias is None else summand + contribute(_plain(bias, split), split.group)
        return wrap(summand, Split(split.group, None, partial=True))
    output = reduce(summand, split.group)
    return output if bias is None else output + _plain(bias, split)


def _column(
    tensor: SplitTensor, weight: Any, bias: Any, split: Split, out_dim: int, product: Callable[[Tensor, Tensor], Tensor]
) -> Any:
    column = split.column
    if column is None or not hasattr(weight, "device_mesh"):
        raise CannotSplitError(
            "its weight is computed from its parameters (by a parametrization, say)"
            if column
            else "a whole layer stands where a column-wise one was planned",
            frozenset({column.name}) if column else split.sources,
        )
    output = product(tensor, stored_to_used(weight, out_dim, column, split.group))
    if bias is not None:
        is_stored = hasattr(bias, "device_mesh")
        output = output + (stored_to_used(bias, 0, column, split.group) if is_stored
                           else take(bias, 0, column.pieces, split.group))  # fmt: skip
    return column_output(output, column, column.pieces, split.group)


def stored_to_used(parameter: Any, dim: int, column: Column, group: TensorGroup) -> Tensor:
    """This rank's rows of a column-wise parameter.

    Parameters are stored as plain shards of their original rows, so that every checkpoint, norm and optimizer sees
    them as they are; packed ones change rows with the other ranks at each use.
    """
    local = parameter.to_local()
    return local if len(column.pieces) == 1 else exchange(local, dim, column.pieces, group)


def column_output(output: Tensor, column: Column, pieces: tuple[int, ...], group: TensorGroup) -> SplitTensor:
    """Mark what a column-wise layer (or some of its pieces) returned as split in its last dim."""
    sources = frozenset({column.name})
    return wrap(output, Split(group, output.dim() - 1, pieces, sources, yields=column.is_head))


def _plain(parameter: Any, split: Split) -> Any:
    if hasattr(parameter, "device_mesh"):
        raise CannotSplitError("a weight that is split is used outside its layer", split.sources)
    return parameter


RULES: dict[str, Any] = {"linear": linear, "addmm": addmm}
