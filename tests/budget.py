"""What the tests of each folder cost, beside what they may cost: ``pytest --budget``.

The cost is processor time of the test process and of all that it starts. Wall time says how busy
the machine is; processor time, divided by the cores, is what a run takes on an idle one. A folder over its budget is
marked in the table and fails nothing, since seconds differ by machine.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Generator, Iterable
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

# What each folder may cost in processor seconds; all of them together have two cores for ten minutes.
ALL = 2 * 600
BUDGET = {
    "benchmarks": 40,
    "callbacks": 15,
    "checkpoint": 25,
    "cli": 50,
    "comm": 10,
    "data_parallel": 110,
    "docs": 90,
    "gradients": 50,
    "lightning": 150,
    "loop": 30,
    "microbatches": 60,
    "modules": 30,
    "parity": 100,
    "pipeline_parallel": 150,
    "precision": 60,
    "sharded_tensors": 20,
    "tensor_parallel": 160,
    "verify": 10,
    ".": 40,
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--budget", action="store_true", help="show what the tests of each folder cost")


def _used() -> float:
    """Processor seconds of this process and of all that descend from it, those that ended among them."""
    ended = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in ended) + sum(map(_seconds_of, _children("self")))


def _children(pid: str) -> list[str]:
    return [child for path in Path(f"/proc/{pid}/task").glob("*/children") for child in path.read_text().split()]


def _seconds_of(pid: str) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK") + sum(map(_seconds_of, _children(pid)))
    except OSError:  # it has just ended
        return 0.0


_marks: dict[str, float] = {}


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_logstart(nodeid: str) -> None:
    _marks[nodeid] = _used()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    """Each report carries what its phase cost; attributes of reports travel from pytest-xdist's processes, too."""
    report = yield
    now = _used()
    report.processor_seconds = now - _marks.get(item.nodeid, now)
    _marks[item.nodeid] = now
    return report


def by_folder(reports: Iterable[Any]) -> dict[str, tuple[int, float, float]]:
    """``folder → (tests, wall seconds, processor seconds)``; files that lie in no folder are counted under ``.``."""
    found: dict[str, tuple[int, float, float]] = {}
    for report in reports:
        parts = PurePosixPath(report.nodeid.split("::")[0]).parts
        folder = parts[1] if len(parts) > 2 else "."
        tests, wall, processor = found.get(folder, (0, 0.0, 0.0))
        found[folder] = tests + (report.when == "call"), wall + report.duration, processor + report.processor_seconds
    return found


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if not config.getoption("--budget"):
        return
    reports = [report for kind in terminalreporter.stats.values() for report in kind if _is_costed(report)]
    terminalreporter.write_sep("=", "processor seconds by folder")
    terminalreporter.write_line(f"{'folder':<20}{'tests':>7}{'wall':>9}{'cost':>9}{'budget':>9}")
    total = 0.0
    for folder, (tests, wall, processor) in sorted(by_folder(reports).items(), key=lambda row: -row[1][2]):
        budget = BUDGET.get(folder, 0)
        over = "  over" if processor > budget else ""
        terminalreporter.write_line(f"{folder:<20}{tests:>7}{wall:>9.0f}{processor:>9.0f}{budget:>9}{over}")
        total += processor
    terminalreporter.write_line(f"{'all':<20}{'':>16}{total:>9.0f}{sum(BUDGET.values()):>9}")


def _is_costed(report: Any) -> bool:
    return hasattr(report, "processor_seconds")
