"""This package for the Trainer of ``pytorch_lightning``, whose classes are not those of ``lightning.pytorch``.

``from lightning_effi.pytorch_lightning import EffiStrategy`` gives the same names as ``lightning_effi`` does, made from
the same source with the names of the older package in it. Importing it registers the strategies' names there.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from types import CodeType, ModuleType

_SOURCE = Path(__file__).parent
_IMPORT = re.compile(r"^ *(?:from|import) .*$", re.MULTILINE)
_OLDER_NAMES = (
    (re.compile(r"\blightning\.pytorch\b"), "pytorch_lightning"),
    (re.compile(r"\blightning\.fabric\b"), "lightning_fabric"),
    (re.compile(r"\blightning_effi\b"), __name__),
)

__path__ = [str(_SOURCE)]  # submodules are found by _Finder alone


def _code(file: Path) -> CodeType:
    """Of a module of this package, with the older names in its imports."""
    return compile(_IMPORT.sub(_with_older_names, file.read_text()), str(file), "exec", dont_inherit=True)


def _with_older_names(line: re.Match[str]) -> str:
    text = line[0]
    for newer, older in _OLDER_NAMES:
        text = newer.sub(older, text)
    return text


class _Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        return _code(Path(self.path))  # not cached: the cache belongs to the module as it stands in the file


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith(__name__ + "."):
            return None
        place = _SOURCE.joinpath(*fullname.removeprefix(__name__ + ".").split("."))
        file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
        if not file.is_file() or file == Path(__file__):
            return None
        return importlib.util.spec_from_file_location(fullname, file, loader=_Loader(fullname, str(file)))


sys.meta_path.insert(0, _Finder())
exec(_code(_SOURCE / "__init__.py"))
