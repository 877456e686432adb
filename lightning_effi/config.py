"""What a user may ask for: frozen dataclasses, their short forms and their validation.

Nothing here imports a distributed engine, so a configuration can be read, checked and printed anywhere.
Every ``ValueError`` names the setting, the value that was given and the values that are allowed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from datetime import timedelta
from pkgutil import resolve_name
from typing import Any, Literal, get_args

ZeroStage = Literal[0, 1, 2, 3]
MicrobatchWeight = Literal["auto", "samples", "uniform", "valid_labels"]
Schedule = Literal["1f1b", "gpipe", "interleaved", "zb1p", "zbv"]
CheckpointingPolicy = Literal["full", "selective", "adaptive", "uniform", "minimal", "balanced", "sqrt", "tradeoff"]
Attention = Literal["auto", "flash", "efficient", "cudnn", "math", "model"]
StateDtype = Literal["float32", "bfloat16", "float16", "int8"]
GradientSync = Literal["auto", "every", "last"]
CheckpointFormat = Literal["full", "sharded"]
StartMethod = Literal["auto", "popen", "fork", "spawn"]

_TENSOR_STYLE = re.compile(r"column|row|column_gather|column_packed:\d+(,\d+)*|vocab|replicate")


@dataclass(frozen=True)
class Microbatches:
    """How each batch is cut into pieces inside one ``training_step``.

    ``weight`` names the rule that makes the weighted sum of the pieces' losses equal the loss of the whole batch;
    a dotted path names a callable. ``splitter`` is a dotted path to ``(batch, n) -> list``.
    """

    count: int | Literal["auto"] = "auto"
    weight: str = "auto"
    labels_key: str = "labels"
    ignore_index: int = -100
    splitter: str | None = None
    oom_retry: bool = False

    def __post_init__(self) -> None:
        if self.count != "auto":
            check_positive("microbatches", self.count, also='"auto"')
        for setting in ("weight", "splitter"):
            check_dotted(f"microbatches.{setting}", getattr(self, setting), get_args(MicrobatchWeight))
        check_bool("microbatches.oom_retry", self.oom_retry)


@dataclass(frozen=True)
class Pipeline:
    """The pipeline's schedule, the stages per rank and the blocks per stage.

    ``virtual_stages``: ``interleaved`` takes any number from 2 (the default) on and ``zb1p`` any number (default 1);
    ``zbv`` always has 2, ``gpipe`` and ``1f1b`` have 1.
    """

    schedule: Schedule = "1f1b"
    virtual_stages: int | None = None
    split: Literal["auto"] | list[int] = "auto"

    def __post_init__(self) -> None:
        check_choice("pipeline", self.schedule, Schedule)
        if self.virtual_stages is not None:
            check_positive("pipeline.virtual_stages", self.virtual_stages, also="None")
        name, count = self.schedule, self.stages_per_rank
        if name in ("gpipe", "1f1b") and count != 1:
            raise ValueError(
                f"pipeline: {name!r} has one stage per rank, got virtual_stages={count}. Use 'interleaved' for several"
            )
        if name == "interleaved" and count == 1:
            raise ValueError("pipeline: 'interleaved' needs virtual_stages of at least 2, got 1. Use '1f1b' for 1")
        if name == "zbv" and count != 2:
            raise ValueError(
                f"pipeline: 'zbv' has 2 stages per rank, got virtual_stages={count}. Use 'zb1p' for another number"
            )

    @property
    def stages_per_rank(self) -> int:
        """What was asked for, or the schedule's default."""
        return self.virtual_stages or {"interleaved": 2, "zbv": 2}.get(self.schedule, 1)


@dataclass(frozen=True)
class TensorParallel:
    """Module-name patterns and the style in which each is split; ``"auto"`` derives them from the module.

    ``sequence_parallel``: norms, dropouts and residual additions between split layers work on a part of the sequence.
    """

    plan: Literal["auto"] | Mapping[str, str] = "auto"
    sequence_parallel: bool = False

    def __post_init__(self) -> None:
        check_bool("tensor.sequence_parallel", self.sequence_parallel)
        if self.plan == "auto":
            return
        if not isinstance(self.plan, Mapping):
            raise ValueError(f'tensor.plan must be "auto" or a mapping of name patterns to styles, got {self.plan!r}')
        for pattern, style in self.plan.items():
            if not _TENSOR_STYLE.fullmatch(str(style)):
                raise ValueError(
                    f"tensor.plan: unknown style {style!r} for {pattern!r}; the styles are column, row, column_gather,"
                    " column_packed:k (k equal pieces), column_packed:a,b,... (their sizes), vocab, replicate"
                )


@dataclass(frozen=True)
class ActivationCheckpointing:
    """Which activations are recomputed in backward instead of kept."""

    policy: CheckpointingPolicy
    every: int = 3
    budget: float | None = None
    threshold: float | None = None
    min_inner_dim: int = 2048
    offload: bool = False

    def __post_init__(self) -> None:
        check_choice("activation_checkpointing", self.policy, CheckpointingPolicy)


@dataclass(frozen=True)
class OptimizerStates:
    """How the optimizer's moments are stored between steps."""

    dtype: StateDtype = "float32"
    stochastic_rounding: bool = False
    offload: bool | float = False

    def __post_init__(self) -> None:
        check_choice("optimizer_states", self.dtype, StateDtype)


@dataclass(frozen=True)
class Checkpoints:
    """``full``: one file that plain Lightning loads. ``sharded``: a directory to which every rank writes its part."""

    format: CheckpointFormat = "full"
    asynchronous: bool = False

    def __post_init__(self) -> None:
        check_choice("checkpoints", self.format, CheckpointFormat)


@dataclass(frozen=True)
class EffiConfig:
    """All settings of :class:`~lightning_effi.EffiStrategy`, in long form and checked against each other."""

    zero_stage: ZeroStage = 2
    data_parallel_size: int | Literal["auto"] = "auto"
    replicate_size: int = 1
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    microbatches: Microbatches = field(default_factory=Microbatches)
    pipeline: Pipeline = field(default_factory=Pipeline)
    tensor: TensorParallel | None = None
    activation_checkpointing: ActivationCheckpointing | None = None
    attention: Attention = "auto"
    optimizer_states: OptimizerStates = field(default_factory=OptimizerStates)
    parameter_offload: bool = False
    exact_accumulation: bool = False
    gradient_sync: GradientSync = "auto"
    compile: bool | Mapping[str, Any] = False
    verify: bool | Literal["auto"] = "auto"
    checkpoints: Checkpoints = field(default_factory=Checkpoints)
    process_group_backend: str | None = None
    timeout: timedelta = timedelta(seconds=1800)
    start_method: StartMethod = "auto"

    def __post_init__(self) -> None:
        check_choice("zero_stage", self.zero_stage, ZeroStage)
        check_choice("attention", self.attention, Attention)
        check_choice("gradient_sync", self.gradient_sync, GradientSync)
        check_choice("start_method", self.start_method, StartMethod)
        for name in ("replicate_size", "tensor_parallel_size", "pipeline_parallel_size"):
            check_positive(name, getattr(self, name))
        if self.data_parallel_size != "auto":
            check_positive("data_parallel_size", self.data_parallel_size, also='"auto"')
        for name in ("parameter_offload", "exact_accumulation"):
            check_bool(name, getattr(self, name))
        if self.verify != "auto":
            check_bool("verify", self.verify, also='"auto"')
        if self.timeout <= timedelta(0):
            raise ValueError(f"timeout must be positive (seconds or a timedelta), got {self.timeout}")
        if self.zero_stage == 0 and self.replicate_size > 1:
            raise ValueError(
                f"replicate_size={self.replicate_size} asks for copies of a sharded group, but zero_stage=0 shards"
                " nothing: every rank is a copy already. Use zero_stage=1, 2 or 3, or leave replicate_size at 1"
            )
        if self.tensor is not None and self.tensor_parallel_size == 1:
            raise ValueError(
                f"tensor={self.tensor!r} has no effect with tensor_parallel_size=1. Set tensor_parallel_size, or leave"
                " tensor out"
            )
        split, stages = self.pipeline.split, self.pipeline_parallel_size * self.pipeline.stages_per_rank
        if split != "auto" and self.pipeline_parallel_size > 1 and len(split) != stages:
            raise ValueError(
                f"pipeline split={list(split)} has {len(split)} entries, and {self.pipeline.schedule!r} on"
                f" {self.pipeline_parallel_size} ranks has {stages} stages"
            )
        self._refuse_what_is_not_built()

    def _refuse_what_is_not_built(self) -> None:
        """Settings of the public contract that this version does not carry out are refused, never ignored."""
        unbuilt = ("activation_checkpointing", "attention", "optimizer_states", "parameter_offload", "compile")
        asked = [
            f"{name}={getattr(self, name)!r} (use {default!r})"
            for name in unbuilt
            if getattr(self, name) != (default := _default(EffiConfig, name))
        ]
        if self.checkpoints.asynchronous:
            asked.append(f"checkpoints={self.checkpoints!r} (use asynchronous=False)")
        if self.pipeline_parallel_size > 1 and self.tensor is not None and self.tensor.sequence_parallel:
            asked.append("tensor.sequence_parallel=True with pipeline_parallel_size > 1 (use False)")
        if asked:
            raise ValueError("This version of lightning_effi does not carry out " + "; ".join(asked))

    @property
    def syncs_every_backward(self) -> bool:
        """Whether gradients are reduced in every backward of an accumulation window, or only in its last one."""
        return self.gradient_sync == "every" or (self.gradient_sync == "auto" and self.zero_stage >= 2)


def _default(config: type, name: str) -> Any:
    """The value that means "not asked for"."""
    (found,) = (f for f in fields(config) if f.name == name)
    return found.default if found.default_factory is MISSING else found.default_factory()


def expand(setting: str, value: Any, dataclass_type: type, short: str) -> Any:
    """Turn a short value into the dataclass of its concern: ``expand("pipeline", "zbv", Pipeline, "schedule")``.

    A mapping becomes the dataclass too (YAML without type information); an unknown key is named.
    """
    if value is None or isinstance(value, dataclass_type):
        return value
    if isinstance(value, Mapping):
        allowed = [f.name for f in fields(dataclass_type)]
        unknown = sorted(set(value) - set(allowed))
        if unknown:
            raise ValueError(f"{setting}: unknown key {unknown[0]!r}; the keys are {', '.join(allowed)}")
        return dataclass_type(**value)
    return dataclass_type(**{short: value})


def as_timedelta(value: timedelta | float) -> timedelta:
    """Seconds or a timedelta."""
    if isinstance(value, timedelta):
        return value
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"timeout must be a number of seconds or a timedelta, got {value!r}")
    return timedelta(seconds=value)


def check_choice(setting: str, value: Any, literal: Any) -> None:
    """Raise unless ``value`` is one of the literal's values and of the same type (``True`` is not ``1``)."""
    allowed = get_args(literal)
    if not any(value == choice and type(value) is type(choice) for choice in allowed):
        raise ValueError(f"{setting} must be one of {', '.join(map(repr, allowed))}, got {value!r}")


def check_positive(setting: str, value: Any, also: str | None = None) -> None:
    """Raise unless ``value`` is an integer of at least 1; ``also`` names a further value that is allowed."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        choices = "an integer of at least 1" + (f" or {also}" if also else "")
        raise ValueError(f"{setting} must be {choices}, got {value!r}")


def check_dotted(setting: str, value: Any, names: Sequence[str]) -> None:
    """Raise unless ``value`` is ``None``, one of ``names`` or the dotted path of something callable."""
    if value is None or value in names:
        return
    try:
        if callable(resolve_name(value)):
            return
    except (ValueError, ImportError, AttributeError, TypeError) as error:
        raise ValueError(
            f"{setting} must be one of {', '.join(map(repr, names))} or the dotted path of a function, got {value!r}"
            f" ({error})"
        ) from error
    raise ValueError(f"{setting}: {value!r} is not callable")


def check_bool(setting: str, value: Any, also: str | None = None) -> None:
    """Raise unless ``value`` is ``True`` or ``False``; ``also`` names a further value that is allowed."""
    if not isinstance(value, bool):
        raise ValueError(f"{setting} must be True or False{f' or {also}' if also else ''}, got {value!r}")
