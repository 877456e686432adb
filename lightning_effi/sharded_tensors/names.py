"""What the name of a torch function says about it: the one table for everybody who has to know."""

from __future__ import annotations

# Python's augmented assignments, as far as torch or Python know them. Not everything that begins with ``__i`` is one:
# ``__invert__``, ``__int__``, ``__index__`` and ``__iter__`` write nothing.
_AUGMENTED = frozenset(
    f"__i{operator}__"
    for operator in ("add", "sub", "mul", "matmul", "div", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")
) | {"__ilshift__", "__irshift__"}
# They end like in-place functions, but leave values, shape and memory as they are.
_FLAGS = frozenset({"requires_grad_", "share_memory_"})


def is_in_place(name: str) -> bool:
    """Whether the torch function of this name writes into its first argument."""
    if name.endswith("__"):
        return name == "__setitem__" or name in _AUGMENTED
    return name.endswith("_") and name not in _FLAGS
