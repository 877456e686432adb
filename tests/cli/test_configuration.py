"""The forms in which the strategy can be configured, and that what is printed reads back."""

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.cli.conftest import MODEL

CLASS_PATH = "lightning_effi.EffiStrategy"


@pytest.fixture
def printed_strategy(command_line: Callable) -> Callable:
    """``trainer.strategy`` as printed by ``lightning-effi fit ARGUMENTS --print_config``."""

    def print_config(*arguments: str) -> object:
        done = command_line("fit", *MODEL, *arguments, "--print_config")
        assert done.returncode == 0, done.stderr
        return yaml.safe_load(done.stdout)["trainer"]["strategy"]

    return print_config


def write(path: Path, strategy: object) -> str:
    path.write_text(yaml.safe_dump({"trainer": {"strategy": strategy}}))
    return str(path)


def test_effi_strategy_is_the_default(printed_strategy: Callable) -> None:
    strategy = printed_strategy()
    assert strategy["class_path"] == CLASS_PATH
    assert strategy["init_args"]["zero_stage"] == 2


@pytest.mark.parametrize("name", ["effi", "effi_zero1", "effi_zero2", "effi_zero3", "ddp"])
def test_strategy_may_be_a_name(printed_strategy: Callable, tmp_path: Path, name: str) -> None:
    assert printed_strategy("--config", write(tmp_path / "name.yaml", name)) == name
    assert printed_strategy("--trainer.strategy", name) == name


@pytest.mark.parametrize(
    "form",
    [
        {"class_path": CLASS_PATH, "init_args": {"zero_stage": 3, "replicate_size": 2}},
        {"zero_stage": 3, "replicate_size": 2},
    ],
    ids=["class_path", "options_only"],
)
def test_options_in_yaml(printed_strategy: Callable, tmp_path: Path, form: dict) -> None:
    strategy = printed_strategy("--config", write(tmp_path / "strategy.yaml", form))
    assert strategy["class_path"] == CLASS_PATH
    assert (strategy["init_args"]["zero_stage"], strategy["init_args"]["replicate_size"]) == (3, 2)


def test_one_option_on_the_command_line_leaves_the_others(printed_strategy: Callable, tmp_path: Path) -> None:
    form = {"class_path": CLASS_PATH, "init_args": {"zero_stage": 3, "replicate_size": 2}}
    config = write(tmp_path / "strategy.yaml", form)
    strategy = printed_strategy("--config", config, "--trainer.strategy.zero_stage=1")
    assert (strategy["init_args"]["zero_stage"], strategy["init_args"]["replicate_size"]) == (1, 2)


def test_nested_dataclass_on_the_command_line(printed_strategy: Callable) -> None:
    assert printed_strategy("--trainer.strategy.checkpoints=sharded")["init_args"]["checkpoints"] == "sharded"
    long_form = printed_strategy("--trainer.strategy.checkpoints={format: sharded}")["init_args"]["checkpoints"]
    assert long_form.get("init_args", long_form)["format"] == "sharded"


def test_printed_configuration_reads_back(command_line: Callable, tmp_path: Path) -> None:
    arguments = ["--trainer.strategy.zero_stage=3", "--trainer.strategy.timeout=60", "--trainer.precision=bf16-mixed"]
    first = command_line("fit", *MODEL, *arguments, "--print_config")
    config = tmp_path / "printed.yaml"
    config.write_text(first.stdout)
    second = command_line("fit", "--config", str(config), "--print_config")
    assert yaml.safe_load(second.stdout) == yaml.safe_load(first.stdout)
    assert yaml.safe_load(first.stdout)["trainer"]["strategy"]["init_args"]["zero_stage"] == 3


@pytest.mark.parametrize("subcommand", ["fit", "validate", "test", "predict"])
def test_every_subcommand_shows_its_help(command_line: Callable, subcommand: str) -> None:
    done = command_line(subcommand, "--help")
    assert done.returncode == 0
    assert "--trainer.strategy" in done.stdout


def test_help_lists_the_subcommands_that_exist(command_line: Callable) -> None:
    done = command_line("--help")
    assert done.returncode == 0
    assert done.stdout.startswith("usage: lightning-effi ")
    for subcommand in ("fit", "validate", "test", "predict"):
        assert subcommand in done.stdout
    for absent in ("doctor", "export", "inspect"):
        assert absent not in done.stdout
