"""The line of the user's code in which something was done, for messages."""

from __future__ import annotations

import linecache
import site
import sys
import sysconfig
from pathlib import Path
from types import FrameType

_FRAMEWORKS = ("torch", "lightning", "lightning_fabric", "lightning_utilities", "pytorch_lightning", "torchmetrics")
_PACKAGE = f"{Path(__file__).parents[1]}/"
_INSTALLED = tuple({*site.getsitepackages(), site.getusersitepackages(), sysconfig.get_paths()["purelib"]})
_STANDARD = tuple({sysconfig.get_paths()["stdlib"], sysconfig.get_paths()["platstdlib"]})


def here() -> str:
    """The innermost line of user code that is being run, as `` (file.py:12, in training_step: x = y.mean())``.

    Where only libraries run, it is the innermost line of one that is no framework; empty where there is none.
    """
    library = ""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        kind = _kind_of(frame.f_code.co_filename)
        if kind == "user":
            return _describe(frame)
        if kind == "library" and not library:
            library = _describe(frame)
        frame = frame.f_back
    return library


def _kind_of(path: str) -> str:
    if path.startswith(_PACKAGE) or path.startswith("<"):
        return "framework"
    for root in _INSTALLED:
        if path.startswith(root):
            package = path[len(root) + 1 :].split("/")[0]
            return "framework" if package in _FRAMEWORKS else "library"
    return "framework" if path.startswith(_STANDARD) else "user"


def _describe(frame: FrameType) -> str:
    path, line = frame.f_code.co_filename, frame.f_lineno
    text = linecache.getline(path, line).strip()
    file = path.replace("\\", "/").rpartition("/")[2]
    return f" ({file}:{line}, in {frame.f_code.co_name}{f': {text}' if text else ''})"
