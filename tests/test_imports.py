"""Importing the package is light: engines and optional libraries are imported where they are first used."""

from __future__ import annotations

import subprocess
import sys

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


def modules_after(statement: str) -> set[str]:
    """The modules that a fresh interpreter holds after ``statement``."""
    script = f"import sys\n{statement}\nprint('\\n'.join(sys.modules))"
    finished = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    return set(finished.stdout.split())


def test_import_brings_no_engine_that_lightning_does_not_bring() -> None:
    before, after = modules_after("import lightning.pytorch"), modules_after("import lightning_effi")
    assert "lightning_effi.strategy" in after
    assert [name for name in HEAVY if name in after - before] == []


def test_config_imports_no_engine() -> None:
    script = (
        "import runpy, importlib.util, pathlib, sys\n"
        "root = pathlib.Path(importlib.util.find_spec('lightning_effi').submodule_search_locations[0])\n"
        "runpy.run_path(str(root / 'config.py'))"
    )
    assert "torch" not in modules_after(script)
