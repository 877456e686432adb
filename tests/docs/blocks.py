"""The fenced code blocks of a Markdown file, in order."""

import re
from dataclasses import dataclass
from pathlib import Path

FENCE = re.compile(r'^```(?P<language>\w+)(?: title="(?P<title>[^"]+)")?\n(?P<code>.*?)^```$', re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block: ```` ```python title="train.py" ````."""

    language: str
    title: str | None
    code: str
    line: int


def read_blocks(path: Path) -> list[Block]:
    """All fenced blocks of the file at ``path``; every fence has to name its language."""
    text = path.read_text()
    fences = len(re.findall(r"^```", text, re.MULTILINE))
    found = list(FENCE.finditer(text))
    if fences != 2 * len(found):
        raise ValueError(f"{path}: {fences} fence lines, but {len(found)} blocks of the form ```language")
    return [
        Block(match["language"], match["title"], match["code"], text.count("\n", 0, match.start()) + 1)
        for match in found
    ]
