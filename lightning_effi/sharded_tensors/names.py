"""What the name of a torch function says about it: the one table for everybody who has to know."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

# Whatever their arguments are, what they return may share memory with the first one.
VIEWS = frozenset(
    """
    __getitem__ select narrow chunk split tensor_split unbind view view_as reshape flatten unflatten squeeze unsqueeze
    t transpose swapaxes swapdims permute movedim moveaxis adjoint diagonal linalg_diagonal expand expand_as
    broadcast_to unfold detach ravel reshape_as hsplit vsplit dsplit split_with_sizes unsafe_chunk unsafe_split
    unsafe_split_with_sizes slice_inverse index alias view_as_real view_as_complex
    """.split()  # noqa: SIM905
)
DRAWS_LIKE = frozenset({"rand_like", "randn_like", "randint_like"})
DRAWS = frozenset(
    """
    bernoulli poisson multinomial normal binomial rrelu gumbel_softmax dropout dropout1d dropout2d dropout3d
    alpha_dropout feature_dropout feature_alpha_dropout native_dropout
    """.split()  # noqa: SIM905
)
DRAWS_IN_PLACE = frozenset(
    """
    rrelu_ dropout_ alpha_dropout_ feature_dropout_ feature_alpha_dropout_ normal_ uniform_ bernoulli_ random_
    exponential_ geometric_ cauchy_ log_normal_
    """.split()  # noqa: SIM905
)
# They hand values to Python or NumPy, whatever else is going on.
READS = frozenset(
    {"item", "tolist", "numpy", "__format__", "__array__", "__contains__", "__bool__", "__float__", "__int__"}
)
# They compute nothing from the values of their arguments, and must not run a second time.
NO_VALUES = frozenset(
    {"backward", "__deepcopy__", "__reduce_ex__", "__setstate__", "requires_grad_", "retain_grad", "__hash__"}
)
# What is asked of a tensor without a look at its values. ``__get__`` is the name of every property's function.
_PROPERTIES = frozenset(
    {
        *"shape dtype device layout ndim requires_grad is_leaf grad_fn is_cuda is_cpu is_meta is_sparse".split(),  # noqa: SIM905
        *"_backward_hooks _post_accumulate_grad_hooks output_nr retains_grad".split(),  # noqa: SIM905
    }
)
_MEASURES = frozenset(
    {"size", "dim", "numel", "nelement", "ndimension", "element_size", "is_floating_point", "is_complex"}
)
# What is asked of a tensor's memory and kind, or said to autograd: operators of torch, but nothing is computed.
_QUESTIONS = frozenset(
    """
    stride storage_offset is_contiguous data_ptr get_device is_pinned is_same_size is_set_to is_signed is_inference
    is_distributed is_conj is_neg is_coalesced dense_dim sparse_dim result_type set_data output_nr is_leaf retains_grad
    grad record_stream requires_grad_ new_empty new_zeros new_ones new_full empty_like zeros_like ones_like full_like
    """.split()  # noqa: SIM905
)
# Python's augmented assignments, as far as torch or Python know them. Not everything that begins with ``__i`` is one:
# ``__invert__``, ``__int__``, ``__index__`` and ``__iter__`` write nothing.
_AUGMENTED = frozenset(
    f"__i{operator}__"
    for operator in ("add", "sub", "mul", "matmul", "div", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")
) | {"__ilshift__", "__irshift__"}
# They end like in-place functions, but leave values, shape and memory as they are.
_FLAGS = frozenset({"requires_grad_", "share_memory_"})

# DTensor takes the shifts for in-place operators, by the end of their names, and returns the first argument. In
# squeeze_copy a rank that has one row loses that dim. Of addr and the like with beta=0 it leaves the first argument
# laid out as it is, since nothing is read of it, but the kernel wants to expand it: ranks with several rows raise an
# error, and those with one do not. index_add_ and index_copy_ of a sharded index take the target for gathered.
_WRONG = frozenset({"__lshift__", "__rshift__", "squeeze_copy", "addr", "addr_", "index_add_", "index_copy_"})
# Ranks of which some hold fewer rows than others, or none, come alike through what only looks at one value after the
# other: what torch tags as pointwise, and these, which are other names of such, copies and conversions ...
_POINTWISE = frozenset(
    """
    absolute arccos arccosh arcsin arcsinh arctan arctan2 arctanh conj fix negative isclose isreal
    divide multiply subtract floor_divide greater greater_equal less less_equal not_equal
    fill zero copy to type type_as bool byte char int long short half bfloat16 float double cfloat cdouble chalf
    contiguous cpu cuda detach alias resolve_conj resolve_neg abs
    """.split()  # noqa: SIM905
)
_OPERATORS = frozenset(
    f"__{side}{operator}__"
    for operator in (
        *("add", "sub", "mul", "div", "truediv", "floordiv", "mod", "pow", "and", "or", "xor"),
        *("eq", "ne", "lt", "le", "gt", "ge", "neg", "pos", "abs", "invert"),
    )
    for side in ("", "r", "i")
)
# ... which only puts dims in another order ...
_ORDERS = frozenset(
    "t transpose swapaxes swapdims permute movedim moveaxis adjoint unsqueeze real imag".split()  # noqa: SIM905
)
# ... and which makes one number of many, the latter of at least one: a rank without rows raises an error here.
_REDUCTIONS = frozenset({"sum", "nansum", "mean", "prod", "all", "any", "count_nonzero"})
_NOT_OF_NOTHING = frozenset(
    {"amax", "amin", "max", "min", "aminmax", "norm", "linalg_norm", "linalg_vector_norm", "vector_norm"}
)
# Python's operators that torch has under other names; matrix products and orders of rows go by lengths.
_BY_LENGTHS = frozenset({"__matmul__", "__rmatmul__", "__imatmul__", "__reversed__", "unique"})
# Of integers they raise an error for a zero, which one rank alone may hold.
_DIVISIONS = frozenset({"div", "divide", "floor_divide", "fmod", "remainder"}) | {
    f"__{side}{operator}__" for operator in ("floordiv", "mod") for side in ("", "r", "i")
}
# Of a matrix or range that some rank alone may hold, an error too.
_CHECK_VALUES = frozenset(
    """
    cholesky cholesky_inverse cholesky_solve inverse inv logdet slogdet det lu lu_solve lu_unpack triangular_solve qr
    svd geqrf orgqr ormqr pinverse matrix_power matrix_exp lstsq histc histogram
    """.split()  # noqa: SIM905
)
_NAMESPACES = ("torch.nn.functional", "torch.functional", "torch.linalg", "torch.special", "torch.fft")
_LOSSES = frozenset({"binary_cross_entropy_with_logits", "kl_div"})  # of torch itself


def asks_no_values(func: Callable[..., Any]) -> bool:
    """Whether this function only tells what kind of tensor its argument is; such are called often."""
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return getattr(getattr(func, "__self__", None), "__name__", "") in _PROPERTIES
    return name in _MEASURES


@dataclass(frozen=True)
class Sensitivity:
    """What a function looks at in this rank's part that may differ from rank to rank, and make it alone raise an error.

    Attributes:
        lengths: how many rows there are.
        nothing: whether there are any.
        integers: values, where they are integers: indices, and divisors.
        values: values of any kind.
    """

    lengths: bool = False
    nothing: bool = False
    integers: bool = False
    values: bool = False


def sensitivity(func: Callable[..., Any]) -> Sensitivity:
    """What this function looks at, by its name."""
    name, module = getattr(func, "__name__", ""), getattr(func, "__module__", None)
    return _sensitivity(name.removeprefix("_foreach_"), module in _NAMESPACES)


@cache
def _sensitivity(name: str, computes: bool) -> Sensitivity:
    """What the function of this name looks at; one that no operator bears the name of computes nothing by itself."""
    plain = name if name.endswith("__") else name.removesuffix("_")
    if name == "__get__" or name in _QUESTIONS | _MEASURES or not (computes or _is_operator(name)):
        return Sensitivity()
    if plain in _NOT_OF_NOTHING:
        return Sensitivity(nothing=True)
    if plain in _DIVISIONS:
        return Sensitivity(integers=True)
    if name in _OPERATORS or plain in _POINTWISE | _ORDERS | _REDUCTIONS or _is_tagged(name) or _is_tagged(plain):
        return Sensitivity()
    return Sensitivity(lengths=True, nothing=True, integers=True, values=plain in _CHECK_VALUES)


def _is_operator(name: str) -> bool:
    return name in _OPERATORS | _BY_LENGTHS or hasattr(getattr(torch.ops.aten, name, None), "overloads")


def _is_tagged(name: str) -> bool:
    """Whether torch says of an operator that each value comes of those at its place."""
    packet: Any = getattr(torch.ops.aten, name, None)
    overloads = packet.overloads() if hasattr(packet, "overloads") else []
    return any(torch.Tag.pointwise in getattr(packet, overload).tags for overload in overloads)


def is_in_place(name: str) -> bool:
    """Whether the torch function of this name writes into its first argument."""
    if name.endswith("__"):
        return name == "__setitem__" or name in _AUGMENTED
    return name.endswith("_") and name not in _FLAGS


def writes(func: Callable[..., Any], args: Any, kwargs: Any) -> bool:
    """Whether this call of a torch function writes into its first argument, be it for ``inplace=True``."""
    if is_in_place(getattr(func, "__name__", "")):
        return True
    position = _position(func, "inplace")
    return position is not None and bool(kwargs.get("inplace", len(args) > position and args[position]))


def needs_whole(func: Callable[..., Any]) -> bool:
    """Whether DTensor's own answer is not that of the whole tensor, and not an error either.

    Of a loss it takes the mean of the ranks' means, although parts are of unequal size; of matrix decompositions it
    has rules that disagree with their kernels.
    """
    name = getattr(func, "__name__", "")
    return (
        name.endswith("_loss")
        or name in _LOSSES
        or name in _WRONG
        or (name.startswith("linalg_") and not name.endswith("norm"))
        or _position(func, "reduction") is not None
    )


@cache
def _position(func: Callable[..., Any], parameter: str) -> int | None:
    """Where one of ``torch.nn.functional`` has a parameter of this name."""
    if getattr(func, "__module__", None) != "torch.nn.functional" or not inspect.isfunction(func):
        return None
    names = list(inspect.signature(func).parameters)
    return names.index(parameter) if parameter in names else None
