"""The command line ``lightning-effi``: LightningCLI with EffiStrategy as the default strategy.

The default stands in class form (``{class_path: lightning_effi.EffiStrategy}``), since jsonargparse can only set an
option of a class it knows: this is what makes ``--trainer.strategy.zero_stage=3`` work without naming the class.
"""

import difflib
import inspect
import os
import re
import sys
from collections.abc import Sequence
from typing import Any, Literal, NoReturn, get_args, get_origin, get_type_hints

import lightning.pytorch as pl
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.strategies import ParallelStrategy, StrategyRegistry
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from typing_extensions import override

from lightning_effi.strategy import EffiStrategy

STRATEGY_CLASS_PATH = EffiStrategy.__module__.removesuffix("strategy") + "EffiStrategy"
"""Path under which configurations name the strategy; saved in every ``config.yaml``."""


class EffiArgumentParser(LightningArgumentParser):
    """Lightning's argument parser, ending a wrong configuration in one line instead of a page of usage."""

    @override
    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Print the setting, its value and what is allowed to stderr, and exit with status 2."""
        if not self.exit_on_error or os.environ.get("JSONARGPARSE_DEBUG"):
            super().error(message, ex)  # callers who want the exception with its full text get it
        parser = getattr(ex, "subcommand_parser", None) or self
        program = parser.prog.replace(" [options]", "")
        self.exit(2, f"{program}: error: {summarize_parser_error(message)}\nSee {program} --help\n")


class EffiCLI(LightningCLI):
    """LightningCLI whose ``trainer.strategy`` is EffiStrategy unless the configuration names another one.

    Takes the arguments of ``LightningCLI``. With no ``model_class`` the configuration names the
    LightningModule by its class path, as ``lightning-effi`` does.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("parser_class", EffiArgumentParser)
        super().__init__(*args, **kwargs)

    @override
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Make EffiStrategy in class form the default of ``trainer.strategy``."""
        if "strategy" not in self.trainer_defaults:
            parser.set_defaults({"trainer.strategy": {"class_path": STRATEGY_CLASS_PATH}})

    @override
    def before_instantiate_classes(self) -> None:
        """Refuse unknown strategy names, and let the strategy's own refusals end in one line."""
        strategy = self._get(self.config, "trainer").get("strategy")
        known = ["auto", *StrategyRegistry.available_strategies()]
        if isinstance(strategy, str) and strategy not in known:
            close = difflib.get_close_matches(strategy, known, n=3)
            ours = [name for name in known if name.startswith("effi")]
            hint = f"; did you mean {' or '.join(close)}?" if close else ""
            self._refuse(f"trainer.strategy: no strategy has the name {strategy!r}{hint} Ours: {', '.join(ours)}")
        # Without this, jsonargparse wraps the strategy's message in the text of every other type it tried.
        self.parser.add_instantiator(self._instantiate_strategy, EffiStrategy, subclasses=True)

    @override
    def instantiate_trainer(self, **kwargs: Any) -> pl.Trainer:
        """Build the Trainer; combinations of settings that it or the strategy refuses end in one line."""
        try:
            return super().instantiate_trainer(**kwargs)
        except (MisconfigurationException, ValueError) as error:
            self._refuse(f"trainer: {error}", error)

    def _instantiate_strategy(self, class_type: type[EffiStrategy], *args: Any, **kwargs: Any) -> EffiStrategy:
        try:
            return class_type(*args, **kwargs)
        except (TypeError, ValueError) as error:
            self._refuse(f"trainer.strategy: {error}", error)

    def _refuse(self, message: str, cause: Exception | None = None) -> NoReturn:
        self._parser(self.subcommand).error(message, cause)


def summarize_parser_error(message: str) -> str:
    """Reduce jsonargparse's account of every type it tried to the setting, the value and what is allowed.

    Args:
        message: The text that jsonargparse passes to ``ArgumentParser.error``.

    Returns:
        One line such as ``trainer.strategy.zero_stage: 4 is not allowed; expected 0, 1, 2, 3``. A text of another shape
        is returned as it is, so nothing is lost when jsonargparse words an error differently.
    """
    keys = re.findall(r'[Pp]arser key "([^"]+)":', message)
    if not keys:
        return message
    name = ".".join(keys)
    about_leaf = message.rsplit(f'arser key "{keys[-1]}":', 1)[1]
    given = re.search(r"(?:Got value|Given value): (?:NestedArg\(key=.+?, val='(.*)'\)|(.+))", about_leaf)
    value = (given[1] or given[2]) if given else ""

    if unknown := re.search(r"Option '([^']+)' is not accepted", about_leaf):
        return f"{name}: there is no option {unknown[1]!r}{_suggestion(unknown[1], about_leaf)}"
    if no_class := re.search(r"Expected a dot import path string: (effi\w*)", about_leaf):
        return (
            f"{name}: the name {no_class[1]!r} takes no options; to set them, write "
            f"class_path: {STRATEGY_CLASS_PATH} in its place"
        )
    if problem := re.search(r"Problem with given class_path '[^']+':\s+(.+)", about_leaf):
        return f"{name}: {problem[1].strip()}"
    expected = re.findall(
        r"(?:Expected an?|does not match) (?!path\b|dot import)(.+?)(?:\. Got value.*)?$", about_leaf, re.M
    )
    if not expected:
        return message
    allowed = _choices(keys) or " or ".join(dict.fromkeys(_readable_type(text) for text in expected))
    return f"{name}: {value} is not allowed; expected {allowed}"


def _suggestion(unknown: str, context: str) -> str:
    """Name the strategy's options, the closest first, when the unknown one was meant for it."""
    if "EffiStrategy" not in context:
        return ""
    plumbing = inspect.signature(ParallelStrategy).parameters  # arguments that the Trainer fills in
    options = [name for name in inspect.signature(EffiStrategy).parameters if name not in plumbing]
    close = difflib.get_close_matches(unknown, options, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; expected one of {', '.join(options)}"


def _choices(keys: list[str]) -> str:
    """The values of a strategy's option that has a fixed list of them; jsonargparse may ask for an int instead."""
    if keys[:-1] != ["trainer.strategy"]:
        return ""
    annotation = get_type_hints(EffiStrategy.__init__).get(keys[-1])
    return ", ".join(map(repr, get_args(annotation))) if get_origin(annotation) is Literal else ""


def _readable_type(text: str) -> str:
    """``typing.Literal[0, 1]`` → ``0, 1``; ``<class 'int'>`` → ``int``; ``<class 'NoneType'>`` → ``null``."""
    text = re.sub(r"(?:typing\.)?Literal\[(.*?)\]", r"\1", text)
    text = re.sub(r"<class '(?:[\w.]+\.)?(\w+)'>", r"\1", text)
    return text.replace("NoneType", "null").strip()


def main(args: Sequence[str] | None = None) -> None:
    """Entry point of ``lightning-effi`` and ``python -m lightning_effi``.

    Args:
        args: Command line without the program's name; ``sys.argv[1:]`` if left out. Processes that Lightning starts
            repeat the command in ``sys.argv``, so pass ``args`` only for runs in one process.

    Modules of the current directory can be named in class paths, as with ``python -m``.
    """
    # A console script has its own folder first on the path, ``python -m`` the current one: make both alike.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    EffiCLI(
        parser_kwargs={"prog": "lightning-effi", "description": "Train, evaluate and predict with EffiStrategy."},
        args=None if args is None else list(args),
    )
