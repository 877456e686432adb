"""Show what a run of the demonstration cost and reached: ``python -m examples.report runs/demo``."""

import argparse
import csv
import json
from pathlib import Path

from rich.console import Console
from rich.table import Table


def newest_run(folder: Path) -> Path:
    """The ``version_*`` folder that the logger made last.

    Raises:
        FileNotFoundError: There is no finished run in ``folder``.
    """
    runs = sorted(folder.glob("version_*"), key=lambda path: int(path.name.removeprefix("version_")))
    if not runs:
        raise FileNotFoundError(f"no run in {folder}; start one with: lightning-effi fit --config configs/demo.yaml")
    return runs[-1]


def read_losses(run: Path, name: str) -> list[tuple[int, float]]:
    """(step, value) of each logged value of the metric ``name``."""
    with (run / "metrics.csv").open(newline="") as file:
        return [(int(row["step"]), float(row[name])) for row in csv.DictReader(file) if row.get(name)]


def table(run: Path) -> Table:
    """Loss, speed and bytes per rank beside those of DDP."""
    measured = json.loads((run / "measurements.json").read_text())
    train, validation = read_losses(run, "train_loss"), read_losses(run, "val_loss")
    last = [value for _, value in train[-10:]]

    result = Table(
        title=f"{measured['steps']} steps on {measured['processes']} processes, {measured['strategy']}",
        caption="bytes between steps; while one runs, parameters are gathered as the plan printed above says",
    )
    result.add_column("")
    result.add_column("this run", justify="right")
    result.add_column("plain DDP", justify="right")
    result.add_row("training loss at start", f"{train[0][1]:.3f}", "")
    result.add_row("training loss at end (mean of last 10 values)", f"{sum(last) / len(last):.3f}", "")
    if validation:
        result.add_row("validation loss at end", f"{validation[-1][1]:.3f}", "")
    if measured["tokens_per_second"]:
        result.add_row(
            "tokens per second, all processes", f"{measured['tokens_per_second']:,.0f}", "", end_section=True
        )
    for name, count in measured["bytes"].items():
        result.add_row(f"bytes per rank: {name}", f"{count['held']:,}", f"{count['whole']:,}")
    held, whole = (sum(count[kind] for count in measured["bytes"].values()) for kind in ("held", "whole"))
    result.add_row("bytes per rank: together", f"{held:,}", f"{whole:,}")
    return result


def plot(run: Path) -> Path:
    """Draw the loss curves into ``loss.png`` and return its path."""
    import matplotlib

    matplotlib.use("Agg")  # no display is needed to write a file
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    for name, style in (("train_loss", "-"), ("val_loss", "o-")):
        if losses := read_losses(run, name):
            axes.plot(*zip(*losses, strict=True), style, label=name.replace("_", " "))
    axes.set(xlabel="optimizer step", ylabel="cross-entropy (nats per byte)", title="GPT on Python's standard library")
    axes.grid(alpha=0.3)
    axes.legend()
    path = run / "loss.png"
    figure.savefig(path, dpi=120, bbox_inches="tight")
    plt.close(figure)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="folder of the runs, such as runs/demo")
    run = newest_run(parser.parse_args().folder)
    console = Console()
    console.print(table(run))
    console.print(f"Loss curve: {plot(run)}")


if __name__ == "__main__":
    main()
