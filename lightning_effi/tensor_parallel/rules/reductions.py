"""Functions that reduce or normalise over some dims: on parts where the split dim is not among them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from lightning_effi.tensor_parallel.collectives import reduce, share_all
from lightning_effi.tensor_parallel.rules.elementwise import elementwise
from lightning_effi.tensor_parallel.rules.wholes import run_on_wholes
from lightning_effi.tensor_parallel.split import SplitTensor, refuse_stored, wrap

Args = tuple[Any, ...]
Kwargs = dict[str, Any]

_KEEP_SHAPE = ["softmax", "log_softmax", "softmin", "cumsum", "cumprod"]
_REDUCE = ["sum", "mean", "var", "std", "amax", "amin", "logsumexp", "norm", "vector_norm", "argmax", "argmin", "all",
           "any", "prod", "linalg_vector_norm"]  # fmt: skip


def along_dim(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """Keeps all dims: softmax and the like."""
    tensor = args[0] if args else kwargs.get("input")
    dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
    if not isinstance(tensor, SplitTensor):
        return run_on_wholes(func, args, kwargs)
    split = tensor.placement
    if split.dim is None:
        return elementwise(func, args, kwargs)
    if not isinstance(dim, int) or dim % tensor.dim() == split.dim:
        return run_on_wholes(func, args, kwargs)
    return wrap(func(*args, **kwargs), split)


def reduction(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """Drops dims, or keeps them with size 1."""
    tensor = args[0] if args else kwargs.get("input")
    position = 2 if func.__name__ in ("norm", "vector_norm", "linalg_vector_norm") else 1
    dim = kwargs.get("dim", args[position] if len(args) > position else None)
    if not isinstance(tensor, SplitTensor) or dim is None or isinstance(dim, (Tensor, bool)):
        return run_on_wholes(func, args, kwargs)
    split = tensor.placement
    dims = {d % tensor.dim() for d in ([dim] if isinstance(dim, int) else dim)}
    if split.dim in dims and func.__name__ in ("sum", "mean") and tensor.is_floating_point() and split.is_even:
        total = reduce(func(*args, **kwargs), split.group)  # of all parts, which are of one size
        return total / split.group.size if func.__name__ == "mean" else total
    if split.dim is None or split.dim in dims or not dims:
        return run_on_wholes(func, args, kwargs)
    output = func(*args, **kwargs)
    if not isinstance(output, Tensor):
        return run_on_wholes(func, args, kwargs)
    dropped = 0 if output.dim() == tensor.dim() else sum(d < split.dim for d in dims)
    return wrap(output, split.at(split.dim - dropped))


def extremes(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """``max``, ``topk`` and the like along a dim, which return values and indices; ``max`` of two tensors."""
    tensor = args[0] if args else kwargs.get("input")
    is_search = func.__name__ in ("topk", "kthvalue")
    rest = [*args[1:], *(kwargs[key] for key in ("other",) if key in kwargs)]
    if func.__name__ in ("max", "min") and rest and isinstance(rest[0], Tensor):
        return elementwise(func, args, kwargs)
    position = 2 if is_search else 1
    dim = kwargs.get("dim", args[position] if len(args) > position else -1 if is_search or func.__name__ == "sort" else
                     None)  # fmt: skip
    if not isinstance(tensor, SplitTensor) or type(dim) is not int or tensor.placement.dim is None:
        return run_on_wholes(func, args, kwargs)
    split = tensor.placement
    assert split.dim is not None
    dim %= tensor.dim()
    if dim == split.dim:
        return run_on_wholes(func, args, kwargs)
    found = func(*args, **kwargs)
    dropped = int(found[0].dim() < tensor.dim() and dim < split.dim)
    return type(found)([wrap(part, split.at(split.dim - dropped)) for part in found])


def normalize(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """``F.normalize``."""
    given = dict(zip(("input", "p", "dim", "eps", "out"), args, strict=False)) | kwargs
    tensor, dim = given["input"], given.get("dim", 1)
    if not isinstance(tensor, SplitTensor) or type(dim) is not int or given.get("out") is not None:
        return run_on_wholes(func, args, kwargs)
    if dim % tensor.dim() == tensor.placement.dim:
        return run_on_wholes(func, args, kwargs)
    return wrap(func(**given), tensor.placement)


def normalisation(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """``layer_norm`` and ``rms_norm`` over trailing dims: per head, not over all heads together."""
    names = ["input", "normalized_shape", "weight", "bias", "eps"]
    if func.__name__ == "rms_norm":
        names.remove("bias")
    given = dict(zip(names, args, strict=False)) | kwargs
    tensor = given["input"]
    if not isinstance(tensor, SplitTensor) or tensor.placement.dim is None:
        return run_on_wholes(func, args, kwargs)
    split = tensor.placement
    assert split.dim is not None
    if split.dim >= tensor.dim() - len(given["normalized_shape"]):
        return run_on_wholes(func, args, kwargs)
    keys = [key for key in ("weight", "bias") if isinstance(given.get(key), Tensor)]
    for key in keys:
        refuse_stored(given[key], split)
    given |= dict(zip(keys, share_all([given[key] for key in keys], split.group), strict=True))
    return wrap(func(**given), split)


RULES: dict[str, Any] = (
    dict.fromkeys(_KEEP_SHAPE, along_dim)
    | dict.fromkeys(_REDUCE, reduction)
    | dict.fromkeys(["max", "min", "topk", "sort", "median", "kthvalue"], extremes)
    | {"normalize": normalize, "layer_norm": normalisation, "rms_norm": normalisation}
)
