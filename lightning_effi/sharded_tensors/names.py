"""What the name of a torch function says about it: the one table for everybody who has to know."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

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
# Of no numbers at all they have no result, so a rank without rows raises an error while the others wait for its term.
NOT_OF_NOTHING = frozenset(
    """
    amax amin max min aminmax argmax argmin median nanmedian quantile nanquantile mode kthvalue
    norm linalg_norm linalg_vector_norm vector_norm
    avg_pool1d avg_pool2d avg_pool3d lp_pool1d lp_pool2d lp_pool3d max_pool1d max_pool2d max_pool3d
    max_pool1d_with_indices max_pool2d_with_indices max_pool3d_with_indices
    adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d
    adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d
    adaptive_max_pool1d_with_indices adaptive_max_pool2d_with_indices adaptive_max_pool3d_with_indices
    """.split()  # noqa: SIM905
)
_LOSSES = frozenset({"binary_cross_entropy_with_logits", "kl_div"})  # of torch itself


def asks_no_values(func: Callable[..., Any]) -> bool:
    """Whether this function only tells what kind of tensor its argument is; such are called often."""
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return getattr(getattr(func, "__self__", None), "__name__", "") in _PROPERTIES
    return name in _MEASURES


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
