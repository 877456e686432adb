"""Every code block and command in README.md and docs/ runs.

A document is a story told in one folder: a block with a file name is written there, and the blocks after it can use
it. Blocks are run like this:

* python without a title: as a script of its own
* python titled "notebook": statement by statement in an interactive interpreter, as a notebook would
* bash without a title: by bash, stopping at the first command that fails
* make commands: only looked up in the Makefile, since ``make test`` in a test would start this test again and both
  would install an environment
* bash with a title (a batch job): only parsed, since it needs a cluster
"""

import re
import sys
from functools import partial
from pathlib import Path

import pytest

from tests.cli.process import ROOT
from tests.cli.process import run_command as run_command_anywhere
from tests.docs.blocks import Block, read_blocks

# docs/decisions.md reports experiments; its blocks are excerpts.
DOCUMENTS = [ROOT / "README.md", *sorted(path for path in (ROOT / "docs").glob("*.md") if path.name != "decisions.md")]


# The examples on less text, which the whole documents train on a dozen times.
run_command = partial(run_command_anywhere, before=[Path(__file__).parent / "small"])


def run_block(block: Block, folder: Path) -> None:
    if block.title == "notebook":
        # An interactive interpreter goes on after an error, so its success has to be said by the code itself.
        done = run_command(
            [sys.executable, "-i", "-q"], folder, text=block.code + "\nprint('every statement', 'was run')\n"
        )
        assert "Traceback" not in done.stderr, done.stderr
        assert "every statement was run" in done.stdout, done.stdout
        return
    if block.title is not None:
        (folder / block.title).write_text(block.code)
        if block.language == "bash":
            done = run_command(["bash", "-n", block.title], folder)
            assert done.returncode == 0, done.stderr
        return
    if block.language == "python":
        script = folder / f"line_{block.line}.py"
        script.write_text(block.code)
        done = run_command([sys.executable, script.name], folder)
    elif block.language == "bash":
        commands = block.code.strip().splitlines()
        for target in [command.split()[1] for command in commands if command.startswith("make ")]:
            assert_make_target(target)
        script = "\n".join(command for command in commands if not command.startswith("make "))
        done = run_command(["bash", "-euo", "pipefail", "-c", script], folder)
    else:
        pytest.fail(f"line {block.line}: a {block.language} block needs a title, so that a command can use it")
    assert done.returncode == 0, f"the block at line {block.line} failed\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}"


def assert_make_target(name: str) -> None:
    assert re.search(rf"^{re.escape(name)}:", (ROOT / "Makefile").read_text(), re.MULTILINE), f"no make target {name}"


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_block_runs(document: Path, tmp_path: Path) -> None:
    blocks = read_blocks(document)
    assert blocks, f"{document.name} shows no code"
    for block in blocks:
        run_block(block, tmp_path)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_make_targets_and_links_exist(document: Path) -> None:
    text = document.read_text()
    for target in re.findall(r"`make (\w+)", text):
        assert_make_target(target)
    for link in re.findall(r"\]\((?!https?://)([^)#]+)", text):
        if link.endswith("decisions.md"):
            continue  # written with the first recorded choice
        assert (document.parent / link).exists(), f"{document.name} links to {link}"


def test_readme_has_two_set_up_commands() -> None:
    commands = [
        line
        for block in read_blocks(ROOT / "README.md")
        if block.language == "bash"
        for line in block.code.splitlines()
    ]
    assert [line for line in commands if line.startswith(("make", "pip", "python -m venv", "source"))] == [
        "make demo",
        "make test",
    ]
