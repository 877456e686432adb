"""Where and with what a figure was measured, and how it is written down."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent


def describe_machine() -> dict[str, Any]:
    """CPU model, cores this process may use, memory in GiB, and the GPUs in device order."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "cpu": _cpu_model(),
        "cores": cores,
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "system": platform.platform(),
    }


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def describe_versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide the figures."""
    packages = ("torch", "lightning", "lightning-effi")
    return {"python": platform.python_version(), **{name: _version(name) for name in packages}}


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed (run from the source tree)"


def describe_commit(folder: Path = ROOT) -> dict[str, Any]:
    """Git commit of ``folder`` and whether files differ from it; the hash is None outside a repository."""
    commit = _git(folder, "rev-parse", "--verify", "HEAD")
    changes = _git(folder, "status", "--porcelain")
    return {"hash": commit, "modified": None if changes is None else changes != ""}


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=30)
    except FileNotFoundError:  # a machine without git can still be measured
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def describe_run() -> dict[str, Any]:
    """Everything that must stand beside a figure: time, machine, versions, commit."""
    return {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": describe_machine(),
        "versions": describe_versions(),
        "commit": describe_commit(),
    }


def format_run(description: Mapping[str, Any]) -> str:
    """The lines printed above a table."""
    machine, commit = description["machine"], description["commit"]
    gpus = ", ".join(machine["gpus"]) or "no GPU"
    versions = ", ".join(f"{name} {version}" for name, version in description["versions"].items())
    state = " with local changes" if commit["modified"] else ""
    return "\n".join(
        (
            f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB, {gpus}",
            versions,
            f"commit {commit['hash'] or 'none'}{state}, {description['created']}",
        )
    )


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Plain text columns: the first left-aligned, the others right-aligned."""
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        first = cells[0].ljust(widths[0])
        rest = (cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True))
        return "  ".join((first, *rest)).rstrip()

    rule = "  ".join("-" * width for width in widths)
    return "\n".join((line(header), rule, *(line(row) for row in rows)))


def write_report(folder: Path, name: str, payload: Mapping[str, Any], text: str) -> tuple[Path, Path]:
    """Write ``NAME.json`` and ``NAME.txt`` into ``folder``, which is made if needed; returns both paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = folder / f"{name}.json", folder / f"{name}.txt"
    paths[0].write_text(json.dumps(payload, indent=2) + "\n")
    paths[1].write_text(text + "\n")
    return paths
