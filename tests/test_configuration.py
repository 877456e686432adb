"""Settings that cannot be are refused at once, with all that is allowed, before any process or message."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import pytest
import torch.distributed as dist
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.plugins.precision import DeepSpeedPrecision
from torch.utils.data import DataLoader

from lightning_effi import EffiPrecision, EffiStrategy, Microbatches
from tests.models import MODELS

STAGES = "0, 1, 2, 3"


@pytest.mark.parametrize(
    ("settings", "named", "allowed"),
    [
        ({"zero_stage": 4}, "zero_stage", STAGES),
        ({"zero_stage": "3"}, "zero_stage", STAGES),
        ({"zero_stage": True}, "zero_stage", STAGES),
        ({"zero_stage": 2.0}, "zero_stage", STAGES),
        ({"zero_stage": None}, "zero_stage", STAGES),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size", "an integer of at least 1"),
        ({"tensor_parallel_size": -1}, "tensor_parallel_size", "an integer of at least 1"),
        ({"pipeline_parallel_size": 1.5}, "pipeline_parallel_size", "an integer of at least 1"),
        ({"replicate_size": True}, "replicate_size", "an integer of at least 1"),
        ({"data_parallel_size": "all"}, "data_parallel_size", 'an integer of at least 1 or "auto"'),
        ({"microbatches": 0}, "microbatches", 'an integer of at least 1 or "auto"'),
        ({"pipeline": "1f1b "}, "pipeline", "'1f1b', 'gpipe', 'interleaved', 'zb1p', 'zbv'"),
        ({"activation_checkpointing": "fulll"}, "activation_checkpointing", "'full', 'selective', 'adaptive'"),
        ({"attention": "Flash"}, "attention", "'auto', 'flash', 'efficient', 'cudnn', 'math', 'model'"),
        ({"optimizer_states": "fp8"}, "optimizer_states", "'float32', 'bfloat16', 'float16', 'int8'"),
        ({"gradient_sync": "never"}, "gradient_sync", "'auto', 'every', 'last'"),
        ({"checkpoints": "shard"}, "checkpoints", "'full', 'sharded'"),
        ({"start_method": "forkserver"}, "start_method", "'auto', 'popen', 'fork', 'spawn'"),
        ({"exact_accumulation": 1}, "exact_accumulation", "True or False"),
        ({"parameter_offload": "cpu"}, "parameter_offload", "True or False"),
        ({"verify": "always"}, "verify", 'True or False or "auto"'),
        ({"timeout": 0}, "timeout", "positive"),
        ({"timeout": "30 minutes"}, "timeout", "seconds or a timedelta"),
        ({"checkpoints": {"form": "full"}}, "'form'", "format, asynchronous"),
        ({"microbatches": {"counts": 2}}, "'counts'", "count, weight"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_bad_value_is_refused_at_construction_with_the_allowed_ones(
    settings: dict[str, Any], named: str, allowed: str
) -> None:
    with pytest.raises(ValueError) as caught:
        EffiStrategy(**settings)
    assert named in str(caught.value)
    assert allowed in str(caught.value)


@pytest.mark.parametrize("name", ["zero", "zero_stages", "tensor_parallel"])
def test_unknown_argument_is_refused(name: str) -> None:
    with pytest.raises(TypeError, match=name):
        EffiStrategy(**{name: 2})


def test_settings_after_the_first_need_their_names() -> None:
    with pytest.raises(TypeError, match="positional"):
        EffiStrategy(2, 2)


def test_short_and_long_forms_are_the_same_setting() -> None:
    short, long = (
        EffiStrategy(microbatches=1, timeout=60),
        EffiStrategy(microbatches=Microbatches(count=1), timeout=timedelta(minutes=1)),
    )
    assert short.config == long.config == EffiStrategy(microbatches={"count": 1}, timeout=60.0).config


def test_copies_without_shards_are_refused() -> None:
    with pytest.raises(ValueError, match=r"replicate_size=2.*zero_stage=0 shards\s+nothing"):
        EffiStrategy(0, replicate_size=2)


def make_trainer(devices: int, strategy: EffiStrategy, **flags: Any) -> pl.Trainer:
    return pl.Trainer(accelerator="cpu", devices=devices, strategy=strategy, logger=False, **flags)


def test_all_sizes_that_do_not_fit_are_named_at_once_when_the_trainer_is_made() -> None:
    with pytest.raises(ValueError) as caught:
        make_trainer(4, EffiStrategy(data_parallel_size=3, replicate_size=3))
    message = str(caught.value)
    for part in ("data_parallel_size=3", "4 processes", "replicate_size=3", "1, 2, 4"):
        assert part in message
    assert not dist.is_initialized()


def test_sizes_that_fit_are_readable_once_the_trainer_is_made() -> None:
    trainer = make_trainer(4, EffiStrategy(3, data_parallel_size=4, replicate_size=2))
    layout = trainer.strategy.layout
    assert (layout.world_size, layout.data_parallel_size, layout.replicate, layout.shard) == (4, 4, 2, 2)
    assert not dist.is_initialized()


def test_layout_mesh_and_plan_say_when_they_are_known() -> None:
    strategy = EffiStrategy()
    for name in ("layout", "device_mesh", "plan"):
        with pytest.raises(RuntimeError, match=f"strategy.{name} is known once"):
            getattr(strategy, name)


@pytest.mark.parametrize("zero_stage", [0, 2])
def test_endless_training_is_accepted_with_another_bound(zero_stage: int) -> None:
    case = MODELS["gpt-tied"]
    flags = {"max_steps": -1, "max_epochs": 1, "limit_train_batches": 2, "enable_checkpointing": False}
    trainer = make_trainer(1, EffiStrategy(zero_stage), enable_progress_bar=False, **flags)
    trainer.fit(case.module(), DataLoader(case.batches(3), batch_size=None))
    assert trainer.global_step == 2


def test_precision_given_twice_is_refused_before_training() -> None:
    case = MODELS["gpt-tied"]
    strategy = EffiStrategy(precision_plugin=EffiPrecision("bf16-true"))
    trainer = make_trainer(1, strategy, precision="64-true", enable_checkpointing=False, enable_progress_bar=False)
    with pytest.raises(ValueError, match=r"'64-true'.*'bf16-true' contradict"):
        trainer.fit(case.module(), DataLoader(case.batches(1), batch_size=None))
    assert trainer.global_step == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"precision": "bf16"}, "precision must be one of '32-true', '64-true', 'bf16-mixed', 'bf16-true', '16-mixed'"),
        ({"precision": "bf16-mixed", "growth_interval": 10}, "growth_interval only has an effect with 16-bit float"),
        ({"precision": "bf16-mixed", "master_weights": True}, "master_weights=True adds an fp32 copy to 'bf16-true'"),
        ({"precision": "32-true", "keep_fp32": ["*norm*"]}, "keep_fp32 needs parameters held in fp32"),
        ({"precision": "bf16-true", "master_weights": "yes"}, "master_weights must be True or False"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_precision_settings_without_effect_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        EffiPrecision(**settings)
    assert message in str(caught.value)


def test_stock_plugins_become_ours_and_foreign_ones_are_refused() -> None:
    trainer = make_trainer(1, EffiStrategy(), plugins=[MixedPrecision("bf16-mixed", "cpu")])
    assert isinstance(trainer.strategy.precision_plugin, EffiPrecision)
    assert trainer.strategy.precision_plugin.precision == "bf16-mixed"
    with pytest.raises(TypeError, match="DeepSpeedPrecision"):
        EffiStrategy(precision_plugin=DeepSpeedPrecision("32-true"))
