"""Importing the package is light, and the rooms of the house import each other in one direction only.

Engines and optional libraries are imported where they are first used. What is imported for type checking alone counts
as an arrow between rooms, too: who names another room's classes knows that room.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import lightning_effi

ROOT = Path(lightning_effi.__file__).parent

# From the ground to the roof: a room imports rooms that stand before it, and nothing that stands behind.
ROOMS = (
    "compat",
    "config",
    "layout",
    "comm",
    "modules",
    "sharded_tensors",
    "gradients",
    "data_parallel",
    "precision",
    "context",
    "verify",
    "tensor_parallel",
    "microbatches",
    "pipeline_parallel",
    "checkpoint",
    "loop",
    "plan",
    "mesh",
    "launch",
    "callbacks",
    "parallelize",
    "at_work",
    "strategy",
    "cli",
    "__init__",
    "__main__",
    "pytorch_lightning",
)

HEAVY = (
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "torch.distributed.pipelining",
    "transformers",
    "timm",
    "peft",
    "matplotlib",
    "torchao",
)


def modules_after(*statements: str) -> list[set[str]]:
    """The modules that a fresh interpreter holds after each of ``statements``."""
    script = "import sys\n" + "".join(f"{statement}\nprint(*sys.modules)\n" for statement in statements)
    finished = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    return [set(line.split()) for line in finished.stdout.splitlines()]


def test_import_brings_no_engine_that_lightning_does_not_bring() -> None:
    before, after = modules_after("import lightning.pytorch", "import lightning_effi")
    assert "lightning_effi.strategy" in after
    assert [name for name in HEAVY if name in after - before] == []


def test_config_imports_no_engine() -> None:
    script = (
        "import runpy, importlib.util, pathlib, sys\n"
        "root = pathlib.Path(importlib.util.find_spec('lightning_effi').submodule_search_locations[0])\n"
        "runpy.run_path(str(root / 'config.py'))"
    )
    [after] = modules_after(script)
    assert "torch" not in after


# A split tensor looks up what torch functions do with it, and that makes split tensors: imported where it is called.
LOOKED_UP = ("tensor_parallel.rules", "tensor_parallel.layers.multihead")


def imports() -> Iterator[tuple[str, str]]:
    """Every import of one file of the package by another, in functions and for type checking too: dotted names."""
    files = {_name(path): path for path in ROOT.rglob("*.py")}
    for name, path in files.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lightning_effi"):
                source = (node.module or "").removeprefix("lightning_effi").removeprefix(".")
                for alias in node.names:
                    submodule = f"{source}.{alias.name}".removeprefix(".")
                    yield name, submodule if submodule in files else source or "__init__"


def _name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def _room(name: str) -> str:
    return name.partition(".")[0]


def test_every_room_has_its_place() -> None:
    assert {_room(_name(path)) for path in ROOT.rglob("*.py")} == set(ROOMS)


def test_no_arrow_between_rooms_runs_back_up() -> None:
    found = {(name, source) for name, source in imports() if _room(name) != _room(source)}
    assert len(found) > 100, "the imports are found at all"
    assert sorted(arrow for arrow in found if ROOMS.index(_room(arrow[1])) > ROOMS.index(_room(arrow[0]))) == []


def test_only_the_roof_knows_the_strategy() -> None:
    assert sorted({name for name, source in imports() if source == "strategy"}) == ["__init__", "cli"]


def test_no_files_import_each_other_in_a_circle() -> None:
    graph: dict[str, set[str]] = {}
    for name, source in imports():
        if name != source and not (source in LOOKED_UP and name.startswith("tensor_parallel")):
            graph.setdefault(name, set()).add(source)
    try:
        order = list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        raise AssertionError(f"a circle: {' -> '.join(error.args[1])}") from error
    assert "strategy" in order
