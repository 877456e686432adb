"""Load the checkpoint into the plain module and write a sample: ``python -m examples.sample runs/demo``.

The checkpoint of a sharded run is an ordinary Lightning checkpoint: this program never imports lightning_effi.
"""

import argparse
import sys
from pathlib import Path

import torch
from lightning.pytorch import seed_everything
from rich.console import Console
from rich.panel import Panel

from examples.gpt import GPT
from examples.report import newest_run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="folder of the runs, such as runs/demo")
    parser.add_argument("--prompt", default="def ", help="text to go on from")
    parser.add_argument("--length", type=int, default=300, help="bytes to write")
    arguments = parser.parse_args()

    checkpoint = newest_run(arguments.folder) / "checkpoints" / "gpt.ckpt"
    module = GPT.load_from_checkpoint(checkpoint, map_location="cpu", weights_only=True).eval()
    if "lightning_effi" in sys.modules:
        raise RuntimeError("the checkpoint was to be read without lightning_effi, but something imported it")

    seed_everything(0, verbose=False)
    prompt = torch.tensor([list(arguments.prompt.encode())])
    text = bytes(module.generate(prompt, arguments.length)[0].tolist()).decode(errors="replace")
    print(f"Checkpoint: {checkpoint}")
    Console().print(Panel(text, title="sample, by plain Lightning without lightning_effi"), markup=False)


if __name__ == "__main__":
    main()
