"""The line of the user's code in which something was done, for messages."""

from __future__ import annotations

import linecache
import site
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from itertools import takewhile
from pathlib import Path
from types import FrameType, TracebackType

Frame = tuple[str, int, str]  # file, line, function

_FRAMEWORKS = ("torch", "lightning", "lightning_fabric", "lightning_utilities", "pytorch_lightning", "torchmetrics")
_PACKAGE = f"{Path(__file__).parents[1]}/"
_INSTALLED = tuple({*site.getsitepackages(), site.getusersitepackages(), sysconfig.get_paths()["purelib"]})
_STANDARD = tuple({sysconfig.get_paths()["stdlib"], sysconfig.get_paths()["platstdlib"]})


def here() -> str:
    """The innermost line of user code that is being run, as `` (file.py:12, in training_step: x = y.mean())``.

    Where only libraries run, it is the innermost line of one that is no framework; empty where there is none.
    """
    return _innermost(frames_of(sys._getframe(1)))


def line_in_a_run(frames: Iterable[Frame]) -> str:
    """As :func:`here`, of a stack given by its frames, the innermost first; empty where only the Trainer runs."""
    return _innermost(takewhile(lambda frame: frame[2] != "_call_and_handle_interrupt", frames))


def line_outside_of_this_package(frames: Iterable[Frame]) -> str:
    """As :func:`line_in_a_run`; empty as well where this package, or torch's own sharding, has called the innermost."""
    own = (_PACKAGE, *(f"{root}/torch/distributed/" for root in _INSTALLED))
    inner: list[Frame] = []
    for frame in frames:
        if frame[0].startswith(own):
            return _innermost(inner)
        if frame[2] == "_call_and_handle_interrupt":
            break
        inner.append(frame)
    return _innermost(inner)


def is_in_torch(path: str) -> bool:
    """Whether a file belongs to torch or to this package, as the innermost function does in a wait for other ranks."""
    return path.startswith(_PACKAGE) or any(path.startswith(f"{root}/torch/") for root in _INSTALLED)


def _innermost(frames: Iterable[Frame]) -> str:
    library = ""
    for frame in frames:
        kind = _kind_of(frame[0])
        if kind == "user":
            return _describe(*frame)
        if kind == "library" and not library:
            library = _describe(*frame)
    return library


def frames_of(frame: FrameType | None) -> Iterator[Frame]:
    """A stack of running functions, the innermost first."""
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name
        frame = frame.f_back


def frames_of_traceback(traceback: TracebackType | None) -> list[Frame]:
    """The functions that an exception went through, the outermost first."""
    frames: list[Frame] = []
    while traceback is not None:
        code = traceback.tb_frame.f_code
        frames.append((code.co_filename, traceback.tb_lineno, code.co_name))
        traceback = traceback.tb_next
    return frames


def _kind_of(path: str) -> str:
    if path.startswith(_PACKAGE) or path.startswith("<"):
        return "framework"
    for root in _INSTALLED:
        if path.startswith(root):
            package = path[len(root) + 1 :].split("/")[0]
            return "framework" if package in _FRAMEWORKS else "library"
    return "framework" if path.startswith(_STANDARD) else "user"


def _describe(path: str, line: int, function: str) -> str:
    text = linecache.getline(path, line).strip()
    file = path.replace("\\", "/").rpartition("/")[2]
    return f" ({file}:{line}, in {function}{f': {text}' if text else ''})"
