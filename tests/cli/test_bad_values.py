"""A wrong configuration ends in one line that names the setting and what is allowed, before any process starts."""

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from lightning_effi.cli import summarize_parser_error
from tests.cli.conftest import MODEL

CLASS_PATH = "lightning_effi.EffiStrategy"


def assert_refused(done: object, *words: str) -> None:
    assert done.returncode == 2, done.stdout  # type: ignore[attr-defined]
    message = [line for line in done.stderr.splitlines() if "error:" in line]  # type: ignore[attr-defined]
    assert len(message) == 1, done.stderr  # type: ignore[attr-defined]
    assert "Traceback" not in done.stderr  # type: ignore[attr-defined]
    for word in words:
        assert word in message[0]


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("--trainer.strategy.zero_stage=4", ("trainer.strategy.zero_stage", "4", "0, 1, 2, 3")),
        ("--trainer.strategy.zero_stage=two", ("trainer.strategy.zero_stage", "two", "0, 1, 2, 3")),
        ("--trainer.strategy.zero_stag=3", ("trainer.strategy", "'zero_stag'", "'zero_stage'")),
        ("--trainer.strategy.colour=red", ("trainer.strategy", "'colour'", "zero_stage, data_parallel_size")),
        ("--trainer.strategy.replicate_size=0", ("trainer.strategy", "replicate_size", "0")),
        ("--trainer.strategy.replicate_size=-1", ("trainer.strategy", "replicate_size", "-1")),
        ("--trainer.strategy.data_parallel_size=many", ("data_parallel_size", "many", "'auto'")),
        ("--trainer.strategy.tensor_parallel_size=0", ("trainer.strategy", "tensor_parallel_size", "0")),
        ("--trainer.strategy.pipeline_parallel_size=-2", ("trainer.strategy", "pipeline_parallel_size", "-2")),
        ("--trainer.strategy.pipeline=1f1", ("trainer.strategy.pipeline", "1f1", "'1f1b'")),
        ("--trainer.strategy.activation_checkpointing=fulll", ("activation_checkpointing", "fulll", "'full'")),
        ("--trainer.strategy.checkpoints=whole", ("trainer.strategy.checkpoints", "whole", "'full', 'sharded'")),
        ("--trainer.strategy.start_method=thread", ("start_method", "thread", "'fork'")),
        ("--trainer.strategy=effi_zero5", ("trainer.strategy", "'effi_zero5'", "effi_zero3")),
        ("--trainer.precision=bf17", ("trainer.precision", "bf17", "'bf16-mixed'")),
        ("--trainer.devicess=2", ("--trainer.devicess",)),
    ],
)
def test_wrong_argument(command_line: Callable, argument: str, words: tuple[str, ...]) -> None:
    assert_refused(command_line("fit", *MODEL, argument), *words)


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        ({"class_path": CLASS_PATH, "init_args": {"zero_stage": 4}}, ("zero_stage", "0, 1, 2, 3")),
        ({"class_path": CLASS_PATH, "init_args": {"zero_stage": True}}, ("zero_stage", "0, 1, 2, 3")),
        ({"class_path": CLASS_PATH, "init_args": {"stage": 3}}, ("trainer.strategy", "'stage'", "'zero_stage'")),
        ({"class_path": CLASS_PATH + "s", "init_args": {}}, ("trainer.strategy", "EffiStrategys")),
        ({"checkpoints": {"format": "fulll"}}, ("checkpoints.format", "fulll", "'full', 'sharded'")),
    ],
    ids=lambda value: str(value)[:60],
)
def test_wrong_yaml(command_line: Callable, tmp_path: Path, strategy: dict, words: tuple[str, ...]) -> None:
    config = tmp_path / "wrong.yaml"
    config.write_text(yaml.safe_dump({"trainer": {"strategy": strategy}}))
    assert_refused(command_line("fit", "--config", str(config), *MODEL), *words)


def test_name_takes_no_options(command_line: Callable) -> None:
    arguments = ("--trainer.strategy=effi", "--trainer.strategy.zero_stage=3")
    assert_refused(command_line("fit", *MODEL, *arguments), "'effi'", CLASS_PATH)


def test_unknown_key_in_the_trainer_section(command_line: Callable, tmp_path: Path) -> None:
    config = tmp_path / "wrong.yaml"
    config.write_text("trainer: {strategi: effi}\n")
    assert_refused(command_line("fit", "--config", str(config), *MODEL), "trainer.strategi")


def test_settings_that_lightning_refuses_together(command_line: Callable) -> None:
    done = command_line("fit", *MODEL, "--trainer.accelerator=cpu", "--trainer.devices=0")
    assert_refused(done, "trainer: ", "devices=", "0")


def test_sizes_that_do_not_fit_the_number_of_processes(command_line: Callable) -> None:
    trainer = ("--trainer.accelerator=cpu", "--trainer.devices=2")
    done = command_line("fit", *MODEL, *trainer, "--trainer.strategy.data_parallel_size=3")
    assert_refused(done, "trainer", "data_parallel_size=3", "2 processes")


def test_message_of_unknown_shape_is_kept() -> None:
    assert summarize_parser_error("something else went wrong") == "something else went wrong"
