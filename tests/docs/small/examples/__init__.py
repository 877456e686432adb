"""The examples on little text, for documents, which show what is written and not how fast it is.

The modules are those of the repository; only what is read and given to a step by default is less.
"""

from pathlib import Path

__path__ = [str(Path(__file__).parents[4] / "examples")]

from examples.stdlib_text import StdlibText

StdlibText.__init__.__defaults__ = (32, 4, 60_000, 0.02)
