"""``python -m benchmarks NAME``: run one benchmark; ``python -m benchmarks NAME --help`` lists its options."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

BENCHMARKS = {
    "overhead": "step time and peak memory against hand-written loops and stock Lightning strategies",
    "pipeline": "schedules against their ideal makespan, and a step against a torch.distributed.pipelining loop",
    "precision": "step time and peak memory in low precision against fp32",
    "tensor": "step time of automatic tensor parallelism against a plan written by hand",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Dispatch to ``benchmarks.NAME.main``; returns the process's exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="\n".join(f"{name}: {what}" for name, what in BENCHMARKS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", choices=sorted(BENCHMARKS))
    # Everything after the name, --help included, belongs to the benchmark's own parser.
    chosen = parser.parse_args(arguments[:1]).name
    return importlib.import_module(f"benchmarks.{chosen}").main(arguments[1:])


if __name__ == "__main__":
    sys.exit(main())
