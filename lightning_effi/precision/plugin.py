"""The precision plugin: which dtype is computed with, how losses are scaled, when a step is skipped."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Literal, get_args

import torch
from lightning.pytorch.plugins import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_effi.compat import lightning as lightning_compat
from lightning_effi.config import check_bool
from lightning_effi.data_parallel.optimizers import LocalStep
from lightning_effi.data_parallel.plan import Compute
from lightning_effi.gradients.clipping import Stages, clip_gradient_norm, clip_gradient_value, norms_over
from lightning_effi.gradients.readable import ReadableShards
from lightning_effi.precision import hardware, modules
from lightning_effi.precision.scaling import LossScaler, LossScaling
from lightning_effi.precision.settings import (
    low_precision,
    refuse_float16_parameters,
    refuse_useless,
    scales_losses,
    settings_of,
)
from lightning_effi.precision.steps import AroundStep, ScaledSteps, refuse_unscalable

PrecisionName = Literal["32-true", "64-true", "bf16-mixed", "bf16-true", "16-mixed", "16-true"]

# Where Lightning keeps the state of its own plugin, which a stock Trainer looks for.
_STOCK_KEYS = ("MixedPrecision", "native_amp_scaling_state")


class EffiPrecision(Precision):
    """Lightning's precision flags for :class:`~lightning_effi.EffiStrategy`.

    ``Trainer(precision="bf16-mixed", strategy=EffiStrategy())`` makes one by itself; pass the plugin to reach its
    further settings, and for 16-bit float on a CPU, where Lightning turns the flag into bf16. What a flag means is what
    it means in stock Lightning, whose own plugins do the casting.

    ``16-mixed``, and ``16-true`` with ``master_weights``, multiply the loss by a scale that follows the gradients.
    Where any rank of any axis finds a gradient that is not finite, all ranks skip the step and shrink the scale alike.

    Args:
        precision: ``32-true``, ``64-true``, ``bf16-mixed`` and ``16-mixed`` (autocast, parameters in fp32),
            ``bf16-true`` and ``16-true`` (everything in low precision).
        init_scale: first loss scale (16-bit float only, like the six after it).
        growth_factor: factor by which the scale grows; 1, together with ``backoff_factor=1``, is a static scale.
        backoff_factor: factor by which the scale shrinks after an overflow.
        growth_interval: steps without overflow before the scale grows.
        hysteresis: overflows before the scale shrinks.
        min_scale: smallest scale; several overflows in a row there end the run.
        max_scale: largest scale.
        keep_fp32: name patterns (``fnmatch``) of modules that compute in fp32.
        clamp_activations: bound for the outputs of repeated blocks, with 16-bit float.
        master_weights: with ``bf16-true`` and ``16-true``, keep the parameters in fp32 for the optimizer and compute
            with low-precision copies.

    Raises:
        ValueError: for unknown names, and for settings that do nothing together with ``precision``.
    """

    def __init__(
        self,
        precision: PrecisionName = "32-true",
        *,
        init_scale: float = 65536.0,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        hysteresis: int = 1,
        min_scale: float = 1.0,
        max_scale: float = 2.0**24,
        keep_fp32: Sequence[str] = (),
        clamp_activations: float | None = None,
        master_weights: bool = False,
    ) -> None:
        super().__init__()
        if precision not in get_args(PrecisionName):
            allowed = ", ".join(map(repr, get_args(PrecisionName)))
            raise ValueError(f"precision must be one of {allowed}, got {precision!r}")
        check_bool("master_weights", master_weights)
        self.precision: PrecisionName = precision  # type: ignore[assignment]
        self._low = low_precision(precision)
        self.keep_fp32 = (keep_fp32,) if isinstance(keep_fp32, str) else tuple(keep_fp32)
        self.clamp_activations = clamp_activations
        self.master_weights = master_weights
        scaling = {
            "init_scale": init_scale,
            "growth_factor": growth_factor,
            "backoff_factor": backoff_factor,
            "growth_interval": growth_interval,
            "hysteresis": hysteresis,
            "min_scale": min_scale,
            "max_scale": max_scale,
        }
        refuse_useless(precision, master_weights, self.keep_fp32, clamp_activations, LossScaling.changed(scaling))
        settings = LossScaling(**scaling)  # type: ignore[arg-type]
        self.scaler = LossScaler(settings) if scales_losses(precision, master_weights) else None
        self.last_grad_norm: Tensor | None = None
        self.stages: Stages | None = None
        """The pipeline over which norms are taken."""
        self._device = torch.device("cpu")
        self._is_connected = False
        self._is_in_run = False
        self._steps = None if self.scaler is None else ScaledSteps(self.scaler, self._device, None)
        self._stock = self._stock_plugin()
        self._around_steps: dict[int, AroundStep] = {}

    def __repr__(self) -> str:
        return lightning_compat.belonging(type(self).__name__)

    def __getstate__(self) -> dict[str, Any]:
        """Of the settings and the loss scale; what belongs to a run (its ranks, its optimizers) stays in it."""
        steps = None if self.scaler is None else ScaledSteps(self.scaler, self._device, None)
        return {**self.__dict__, "_steps": steps, "_around_steps": {}, "stages": None}

    @classmethod
    def from_stock(cls, plugin: Precision) -> EffiPrecision:
        """The counterpart of a plugin that Lightning made from ``Trainer(precision=...)``, or that a user made.

        Raises:
            TypeError: for plugins that bring their own kernels or wrappers.
        """
        if isinstance(plugin, cls):
            return plugin
        if type(plugin) is MixedPrecision:
            return cls(plugin.precision, **settings_of(plugin.scaler))  # type: ignore[arg-type]
        if type(plugin) in (Precision, DoublePrecision, HalfPrecision):
            return cls(plugin.precision)  # type: ignore[arg-type]
        raise TypeError(
            f"EffiStrategy does not work with the precision plugin {type(plugin).__module__}."
            f"{type(plugin).__name__}; use"
            f" Trainer(precision=...) or lightning_effi.EffiPrecision"
        )

    # -- what others need to know ------------------------------------------------------------------------------------

    @property
    def compute(self) -> Compute:
        """Dtypes for gathering parameters and reducing gradients."""
        if self.precision.endswith("mixed"):
            return Compute(self._low, reduce_dtype=torch.float32, keep_fp32=self.keep_fp32)
        if self.master_weights:
            # sums of gradients in bf16 lose what is small beside the rest, and scaled ones leave the range of fp16
            return Compute(self._low, everywhere=True, reduce_dtype=torch.float32, keep_fp32=self.keep_fp32)
        return Compute()

    @property
    def loss_scale(self) -> float:
        """What losses are multiplied with before their backward; 1 without loss scaling."""
        return 1.0 if self.scaler is None else self.scaler.scale

    @property
    def skipped_steps(self) -> int:
        """Optimizer steps that were skipped because a gradient was not finite."""
        return 0 if self.scaler is None else self.scaler.skipped_steps

    @property
    def last_step_skipped(self) -> bool:
        """Whether the last optimizer step was skipped because of an overflow."""
        return self._steps is not None and self._steps.last_skipped

    def use_device(self, device: torch.device, group: Any | None = None) -> None:
        """The device whose autocast applies, and all ranks of the run (``None``: only this one).

        Raises:
            ValueError: where the device lacks what is asked for.
        """
        if self._low == torch.float16:
            hardware.refuse_without_float16(device, self.precision)
        if self._low is not None and not self._is_connected:
            hardware.warn_if_slow(device, self._low, self.precision)
        self._is_connected = self._is_in_run = True
        self._device = device
        if self.scaler is not None:
            self._steps = ScaledSteps(self.scaler, device, group)
        self._stock = self._stock_plugin()

    def leave_run(self) -> None:
        """The run of :meth:`use_device` is over."""
        self._is_in_run = False
        self.stages, self._around_steps = None, {}
        if self._steps is not None:
            self._steps.group = None

    def _refuse_other_strategies(self) -> None:
        if self.master_weights and not self._is_in_run:
            raise ValueError(
                "EffiPrecision(master_weights=True) keeps a second copy of each parameter for the optimizer, which only"
                " EffiStrategy does: under this strategy everything would be computed in fp32. Use"
                f" Trainer(strategy=EffiStrategy()), or precision={self.precision!r} without master_weights"
            )

    def norms_over(self, stages: Stages) -> None:
        """From here on, norms are those of the gradients of all stages together."""
        self.stages = stages

    def step_on_shards(self, optimizers: Sequence[Optimizer]) -> None:
        """Let these optimizers update plain local shards where that is known to be the same arithmetic.

        Raises:
            ValueError: for optimizers whose gradients cannot be divided by the loss scale once before their step.
        """
        if self.scaler is not None:
            refuse_unscalable(optimizers, self.precision)
        self._around_steps = {id(opt): LocalStep(opt) for opt in optimizers if LocalStep.serves(opt)}

    def step_in_stages(self, around: Mapping[int, AroundStep]) -> None:
        """Optimizers that are not known to work element by element are entered by a pipeline instead, by their ids."""
        self._around_steps = {**around, **self._around_steps}

    def _stock_plugin(self) -> Precision:
        match self.precision:
            case "64-true":
                return DoublePrecision()
            case "bf16-true" | "16-true":
                return HalfPrecision(self.precision)
            case "bf16-mixed" | "16-mixed":
                return MixedPrecision(self.precision, self._device.type)
            case _:
                return Precision()

    # -- set-up ------------------------------------------------------------------------------------------------------

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        self._refuse_other_strategies()
        modules.restore(module)  # what a run that ended in an error left
        if self.scaler is not None:
            refuse_float16_parameters(module, self.precision)
        if self.master_weights:
            self._convert_buffers(module)
        else:
            module = self._stock.convert_module(module)
        if self.keep_fp32:
            outputs = self._low if self.master_weights else None
            modules.keep_in_fp32(module, self.keep_fp32, self._device.type, outputs)
        if self.clamp_activations is not None:
            modules.clamp_blocks(module, float(self.clamp_activations))
        return module

    def release(self, module: nn.Module) -> None:
        """At the end of a run: take out of the module what :meth:`convert_module` put into it, dtypes excepted."""
        modules.restore(module)

    def _convert_buffers(self, module: nn.Module) -> None:
        """Parameters stay in fp32, as the master copy; what the module computes with besides them is low precision."""
        kept = {id(b) for found in modules.matching(module, self.keep_fp32) for b in found.buffers()}
        for buffer in module.buffers():
            if buffer.is_floating_point() and id(buffer) not in kept:
                buffer.data = buffer.data.to(self._low)

    @override
    def convert_input(self, data: Any) -> Any:
        return self._stock.convert_input(data)

    @override
    def tensor_init_context(self) -> AbstractContextManager[Any]:
        return super().tensor_init_context() if self.master_weights else self._stock.tensor_init_context()

    @override
    def module_init_context(self) -> AbstractContextManager[Any]:
        return super().module_init_context() if self.master_weights else self._stock.module_init_context()

    @override
    @contextmanager
    def forward_context(self) -> Generator[None, None, None]:
        with self._stock.forward_context():
            yield

    @contextmanager
    def in_fp32(self) -> Generator[None, None, None]:
        """Inside, mixed precision computes in fp32: autocast is left out."""
        stock = self._stock
        self._stock = Precision() if self.precision.endswith("-mixed") else stock
        try:
            yield
        finally:
            self._stock = stock

    @property
    def autocasts(self) -> bool:
        """Whether forwards run under autocast at the moment."""
        return isinstance(self._stock, MixedPrecision)

    # -- backward ----------------------------------------------------------------------------------------------------

    @override
    def backward(self, tensor: Tensor, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        super().backward(tensor if self.scaler is None else tensor * self.loss_scale, model, optimizer, *args, **kwargs)

    @override
    def post_backward(self, tensor: Tensor, module: Any) -> Tensor:  # type: ignore[override]
        with ReadableShards():  # on_after_backward looks at gradients
            return super().post_backward(tensor, module)

    # -- the optimizer's step ----------------------------------------------------------------------------------------

    @override
    def optimizer_step(self, optimizer: Optimizer, model: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:  # type: ignore[override]
        if self._steps is None:
            return self._step(optimizer, lambda: self._wrap_closure(model, optimizer, closure), **kwargs)
        closure()  # the backward comes before the step, which may be left out
        result = self._steps.take(
            optimizer, model, partial(self._after_closure, model, optimizer), partial(self._step, optimizer, **kwargs)
        )
        if model.automatic_optimization:
            self.move_scale(model)
        return result

    def _step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """The optimizer's own step, on local shards where it is served."""
        entered: list[AroundStep] = []

        def closure_and_shards() -> Any:
            result = None if closure is None else closure()
            # only known now: in its first step, the closure of a pipeline's run splits the module
            if not entered and (around := self._around_steps.get(id(optimizer))) is not None:
                entered.append(around)
                around.enter()
            return result

        try:
            plain = closure is None and id(optimizer) not in self._around_steps
            return optimizer.step(closure=None if plain else closure_and_shards, **kwargs)
        finally:
            for around in entered:
                around.exit()

    def move_scale(self, model: Any) -> float:
        """Let the loss scale follow what the optimizers found that stepped since the last call, together.

        With manual optimization the strategy calls this when ``training_step`` has ended: the gradients of several
        optimizers may have been made with one scale, which must not move before all of them were used.

        Returns:
            the factor by which gradients that wait for a later step have to be multiplied.

        Raises:
            RuntimeError: on all ranks, where step after step overflows and the scale cannot shrink any further.
        """
        return 1.0 if self._steps is None else self._steps.move_scale(model, in_pipeline=self.stages is not None)

    @override
    def _after_closure(self, model: Any, optimizer: Any) -> None:
        with ReadableShards(), norms_over(self.stages):  # on_before_optimizer_step looks at gradients
            super()._after_closure(model, optimizer)

    # -- clipping ----------------------------------------------------------------------------------------------------

    @override
    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float, norm_type: float = 2.0) -> None:
        """Bound the norm of the whole gradient, over all ranks and axes.

        Args:
            optimizer: whose parameters' gradients are bounded together.
            clip_val: the bound.
            norm_type: p of the p-norm; ``math.inf`` for the largest element.
        """
        self.last_grad_norm = clip_gradient_norm(
            self.main_params(optimizer), float(clip_val), float(norm_type), self.stages, self._scale_of(optimizer)
        )

    @override
    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: int | float) -> None:
        clip_gradient_value(self.main_params(optimizer), float(clip_val) * self._scale_of(optimizer))

    def _scale_of(self, optimizer: Optimizer) -> float:
        """What an optimizer's gradients are multiplied with at the moment.

        With manual optimization, ``self.clip_gradients`` is called before the optimizer's step, which divides them.
        """
        return (
            1.0
            if self._steps is None
            else self._steps.factor_of(lightning_compat.unwrap_lightning_optimizer(optimizer))
        )

    # -- checkpoints -------------------------------------------------------------------------------------------------

    @override
    def state_dict(self) -> dict[str, Any]:
        return {} if self.scaler is None else self.scaler.state_dict()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.scaler is not None and state_dict:
            self.scaler.load_state_dict(state_dict)

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """A stock Trainer with ``16-mixed`` goes on with the scale."""
        if self.precision == "16-mixed":
            checkpoint[_STOCK_KEYS[0]] = self.state_dict()

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """A checkpoint of stock Lightning has the state under other names."""
        if type(self).__qualname__ not in checkpoint:
            self.load_state_dict(next((checkpoint[key] for key in _STOCK_KEYS if key in checkpoint), {}))
