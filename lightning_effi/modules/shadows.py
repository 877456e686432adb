"""Methods that stand in front of an object's own for the length of a run."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

Method = Callable[..., Any]
Context = Callable[[], AbstractContextManager[Any]]

_MISSING = object()


class Shadow:
    """Calls a method inside a context, as long as the run lasts.

    What asks for ``__wrapped__``, as signatures do, finds the method itself. A copy of the instance has a shadow of its
    own method; a pickled one has the method.

    Args:
        method: bound, or any function that stands on the instance.
        context: makes what each call runs in.
        shadows: tells whether the run lasts.
    """

    def __init__(self, method: Method, context: Context, shadows: Shadows) -> None:
        functools.update_wrapper(self, method)
        self._context, self._shadows = context, shadows

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._context() if self._shadows.last else nullcontext():
            return self._method(*args, **kwargs)

    @property
    def _method(self) -> Method:
        return self.__wrapped__  # type: ignore[attr-defined,no-any-return]

    def __deepcopy__(self, memo: dict[int, Any]) -> Shadow:
        return Shadow(copy.deepcopy(self._method, memo), self._context, self._shadows)

    def __reduce__(self) -> Any:
        return _itself, (self._method,)


class Shadows:
    """Puts shadows on instances, and takes them off again.

    Attributes:
        last: whether what was put still holds.
    """

    def __init__(self) -> None:
        self.last = True
        self._originals: list[tuple[Any, str, Any]] = []

    def put(self, owner: Any, name: str, context: Context) -> None:
        """Let each call of ``owner.name`` run inside ``context()``."""
        self._originals.append((owner, name, vars(owner).get(name, _MISSING)))
        owner.__dict__[name] = Shadow(getattr(owner, name), context, self)

    def remove(self) -> None:
        """Leave every instance as it was; an attribute that somebody has set anew since is left alone."""
        self.last = False
        for owner, name, original in reversed(self._originals):
            if not isinstance(vars(owner).get(name), Shadow):
                continue
            if original is _MISSING:
                del owner.__dict__[name]
            else:
                owner.__dict__[name] = original
        self._originals.clear()


def _itself(method: Method) -> Method:
    """What a pickled shadow becomes: the method behind it."""
    return method
