"""The precision plugin: which dtype is computed with, how losses are scaled, when a step is skipped."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal, NoReturn, get_args

import torch
import torch.distributed as dist
from lightning.pytorch.plugins import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer
from typing_extensions import override

from lightning_effi import _compat
from lightning_effi.config import check_bool
from lightning_effi.precision import hardware, modules
from lightning_effi.precision.scaling import PATIENCE, LossScaler, LossScaling
from lightning_effi.precision.unscale import first_nonfinite, unscale_gradients
from lightning_effi.sharding.optimizers import LocalStep
from lightning_effi.sharding.plan import Compute
from lightning_effi.step.clipping import Stages, clip_gradient_norm, clip_gradient_value, norms_over
from lightning_effi.step.readable import ReadableShards

PrecisionName = Literal["32-true", "64-true", "bf16-mixed", "bf16-true", "16-mixed", "16-true"]

_LARGEST_FLOAT16 = torch.finfo(torch.float16).max
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
        self._refuse_useless(LossScaling.changed(scaling))
        settings = LossScaling(**scaling)  # type: ignore[arg-type]
        self.scaler: LossScaler | None = LossScaler(settings) if self._scales_losses else None
        self.last_step_skipped = False
        """Whether the last optimizer step was skipped because of an overflow."""
        self.last_grad_norm: Tensor | None = None
        self.stages: Stages | None = None
        """The pipeline over which norms are taken; set by the strategy."""
        self._device = torch.device("cpu")
        self._is_connected = False
        self._group: Any = None
        self._stock = self._stock_plugin()
        self._local_steps: dict[int, LocalStep] = {}
        self._unscaled: int | None = None  # id of the optimizer whose gradients are unscaled at the moment
        self._overflows: list[bool] = []  # of the optimizers that stepped since the scale moved
        self._culprit: tuple[int, str] | None = None  # position and name of a parameter

    def _refuse_useless(self, scaling: list[str]) -> None:
        precision = self.precision
        if self.master_weights and not precision.endswith("16-true"):
            raise ValueError(
                f"master_weights=True adds an fp32 copy to 'bf16-true' and '16-true'; with precision={precision!r} the"
                " parameters are not held in low precision: leave it out"
            )
        if scaling and not self._scales_losses:
            nearest = "set master_weights=True" if precision == "16-true" else "leave it out"
            raise ValueError(
                f"{', '.join(scaling)} only has an effect with 16-bit float and gradients in fp32 ('16-mixed', or"
                f" '16-true' with master_weights=True), and precision is {precision!r}: {nearest}"
            )
        clamp = self.clamp_activations
        if clamp is not None:
            if self._dtype != torch.float16:
                raise ValueError(
                    f"clamp_activations only has an effect with 16-bit float, and precision is {precision!r}: leave it"
                    " out"
                )
            if isinstance(clamp, bool) or not isinstance(clamp, (int, float)) or not 0 < clamp <= _LARGEST_FLOAT16:
                raise ValueError(
                    f"clamp_activations must be a number between 0 and {_LARGEST_FLOAT16:.0f}, the largest that 16-bit"
                    f" float holds, got {clamp!r}"
                )
        if self.keep_fp32 and not precision.endswith("mixed") and not self.master_weights:
            raise ValueError(
                f"keep_fp32 needs parameters held in fp32, and precision={precision!r} has none, or only such: use"
                " 'bf16-mixed' or '16-mixed', or 'bf16-true' or '16-true' with master_weights=True"
            )

    @classmethod
    def from_stock(cls, plugin: Precision) -> EffiPrecision:
        """The counterpart of a plugin that Lightning made from ``Trainer(precision=...)``, or that a user made.

        Raises:
            TypeError: for plugins that bring their own kernels or wrappers.
        """
        if isinstance(plugin, cls):
            return plugin
        if type(plugin) is MixedPrecision:
            return cls(plugin.precision, **_scaling_of(plugin.scaler))  # type: ignore[arg-type]
        if type(plugin) in (Precision, DoublePrecision, HalfPrecision):
            return cls(plugin.precision)  # type: ignore[arg-type]
        raise TypeError(
            f"EffiStrategy does not work with the precision plugin {type(plugin).__name__}; use"
            f" Trainer(precision=...) or lightning_effi.EffiPrecision"
        )

    # -- what others need to know ------------------------------------------------------------------------------------

    @property
    def _dtype(self) -> torch.dtype | None:
        """The low precision; ``None`` where there is none."""
        if self.precision.startswith("bf16"):
            return torch.bfloat16
        return torch.float16 if self.precision.startswith("16") else None

    @property
    def _scales_losses(self) -> bool:
        """Gradients in fp16 cannot be divided by the scale without losing what it saved, so ``16-true`` has none."""
        return self.precision == "16-mixed" or (self.precision == "16-true" and self.master_weights)

    @property
    def compute(self) -> Compute:
        """Dtypes for gathering parameters and reducing gradients."""
        if self.precision.endswith("mixed"):
            return Compute(self._dtype, reduce_dtype=torch.float32, keep_fp32=self.keep_fp32)
        if self.master_weights:
            # Kept modules have fp32 gradients, and one message has one dtype. Sums of scaled gradients leave fp16.
            in_fp32 = self.keep_fp32 or self._dtype == torch.float16
            reduce_dtype = torch.float32 if in_fp32 else None
            return Compute(self._dtype, everywhere=True, reduce_dtype=reduce_dtype, keep_fp32=self.keep_fp32)
        return Compute()

    @property
    def loss_scale(self) -> float:
        """What losses are multiplied with before their backward; 1 without loss scaling."""
        return 1.0 if self.scaler is None else self.scaler.scale

    @property
    def skipped_steps(self) -> int:
        """Optimizer steps that were skipped because a gradient was not finite."""
        return 0 if self.scaler is None else self.scaler.skipped_steps

    def use_device(self, device: torch.device, group: Any | None = None) -> None:
        """The device whose autocast applies, and all ranks of the run (``None``: only this one).

        Raises:
            ValueError: where the device lacks what is asked for.
        """
        if self._dtype == torch.float16:
            hardware.refuse_without_float16(device, self.precision)
        if self._dtype is not None and not self._is_connected:
            hardware.warn_if_slow(device, self._dtype, self.precision)
        self._is_connected = True
        self._device = device
        self._group = group
        self._stock = self._stock_plugin()

    def step_on_shards(self, optimizers: Sequence[Optimizer]) -> None:
        """Let these optimizers update plain local shards where that is known to be the same arithmetic.

        Raises:
            ValueError: for optimizers whose gradients cannot be divided by the loss scale once before their step.
        """
        if self.scaler is not None and any(isinstance(optimizer, LBFGS) for optimizer in optimizers):
            raise ValueError(
                f"LBFGS computes gradients within its step, which precision={self.precision!r} cannot check for"
                " overflow before. Use precision='bf16-mixed' or '32-true'"
            )
        if self.scaler is not None:
            held = [id(p) for optimizer in optimizers for p in _unique_parameters(optimizer)]
            if len(held) != len(set(held)):
                raise ValueError(
                    f"precision={self.precision!r}: two optimizers hold the same parameter, whose gradient each of them"
                    " would divide by the loss scale. Give it to one of them, or use precision='bf16-mixed'"
                )
        self._local_steps = {id(opt): LocalStep(opt) for opt in optimizers if LocalStep.serves(opt)}

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
        modules.restore(module)  # what a run that ended in an error left
        if self.scaler is not None:
            _refuse_float16_parameters(module, self.precision)
        if self.master_weights:
            self._convert_buffers(module)
        else:
            module = self._stock.convert_module(module)
        if self.keep_fp32:
            outputs = self._dtype if self.master_weights else None
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
                buffer.data = buffer.data.to(self._dtype)

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
        if self.scaler is not None:
            return self._scaled_step(self.scaler, optimizer, model, closure, **kwargs)
        local = self._local_steps.get(id(optimizer))

        def closure_then_hooks() -> Any:
            result = self._wrap_closure(model, optimizer, closure)
            if local is not None:
                local.enter()
            return result

        try:
            return optimizer.step(closure=closure_then_hooks, **kwargs)
        finally:
            if local is not None:
                local.exit()

    def _scaled_step(
        self, scaler: LossScaler, optimizer: Optimizer, model: Any, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """The backward comes before the step, which is left out where any rank found an overflow.

        Fused optimizers, which could divide and skip on the device, are treated like all others: clipping needs the
        divided gradients, and the schedulers need to know on the host whether the step was taken.
        """
        closure()
        found = unscale_gradients(optimizer, scaler.scale, self._device, self._group)
        if found.overflow and not scaler.can_shrink:
            self._culprit = first_nonfinite(model)  # before clipping by an infinite norm makes all gradients NaN
        self._unscaled = id(optimizer)
        try:
            self._after_closure(model, optimizer)
            result = None if found.overflow else self._step(optimizer, **kwargs)
        finally:
            self._unscaled = None
        if found.gradients:
            self._overflows.append(found.overflow)
        if found.overflow:
            scaler.skipped_steps += 1
        if model.automatic_optimization:
            self.move_scale(model)
        return result

    def _step(self, optimizer: Optimizer, **kwargs: Any) -> Any:
        local = self._local_steps.get(id(optimizer))
        if local is None:
            return optimizer.step(**kwargs)
        try:
            local.enter()
            return optimizer.step(**kwargs)
        finally:
            local.exit()

    def move_scale(self, model: Any) -> float:
        """Let the scale follow what the optimizers found that stepped since the last call, together.

        With manual optimization the strategy calls this when ``training_step`` has ended: the gradients of several
        optimizers may have been made with one scale, which must not move before all of them were used.

        Returns:
            the factor by which gradients that wait for a later step have to be multiplied.

        Raises:
            RuntimeError: on all ranks, where step after step overflows and the scale cannot shrink any further.
        """
        scaler = self.scaler
        if scaler is None or not self._overflows:
            return 1.0
        before = scaler.scale
        self.last_step_skipped = any(self._overflows)
        scaler.update(self.last_step_skipped)
        self._overflows.clear()
        if scaler.is_stuck:
            self._raise_stuck(scaler)
        for key, value in (("loss_scale", scaler.scale), ("skipped_steps", float(scaler.skipped_steps))):
            model.log(f"precision/{key}", value, on_step=True, on_epoch=False)
        return scaler.scale / before

    def _raise_stuck(self, scaler: LossScaler) -> NoReturn:
        """On all ranks alike, since all moved the scale alike; names the first gradient that is not finite."""
        culprits = [self._culprit]
        if self._group is not None:
            culprits = [None] * dist.get_world_size(self._group)
            dist.all_gather_object(culprits, self._culprit, group=self._group)
        # in a pipeline, where names are those of a stage, ranks are in the order of stages
        order = [((0 if self.stages is None else rank, c[0]), c[1], rank) for rank, c in enumerate(culprits) if c]
        _, name, rank = min(order, default=(None, "a parameter that is not the module's", 0))
        raise RuntimeError(
            f"loss scaling: {PATIENCE} optimizer steps in a row were skipped at the loss scale {scaler.scale:g}, which"
            f" does not shrink any further. The first gradient that is not finite is that of '{name}' (rank {rank})."
            f" 16-bit float cannot hold what is computed there, or the loss itself is not finite. Use"
            f" keep_fp32=['{name.rpartition('.')[0] or name}'], clamp_activations, a lower learning rate, or"
            " precision='bf16-mixed'; HealthCheck(checks=('nonfinite',)) names the module where it begins"
        )

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
        optimizer = _compat.unwrap_lightning_optimizer(optimizer)
        return 1.0 if self._unscaled == id(optimizer) else self.loss_scale

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


def _unique_parameters(optimizer: Optimizer) -> list[Tensor]:
    return list({id(p): p for group in optimizer.param_groups for p in group["params"]}.values())


def _scaling_of(scaler: Any) -> dict[str, Any]:
    """The settings of a ``torch.amp.GradScaler`` that a user gave to Lightning's own plugin."""
    if scaler is None or not scaler.is_enabled():
        return {}
    scale = scaler.get_scale()
    return {
        "init_scale": scale,
        "growth_factor": scaler.get_growth_factor(),
        "backoff_factor": scaler.get_backoff_factor(),
        "growth_interval": scaler.get_growth_interval(),
        "min_scale": min(scale, LossScaling.min_scale),
        "max_scale": max(scale, LossScaling.max_scale),
    }


def _refuse_float16_parameters(module: nn.Module, precision: str) -> None:
    low = [name for name, p in module.named_parameters() if p.requires_grad and p.dtype == torch.float16]
    if low:
        raise ValueError(
            f"precision={precision!r} needs parameters in fp32, and '{low[0]}' is in fp16, whose gradients cannot be"
            " divided by the loss scale without loss. Build the module in fp32, or use precision='16-true'"
        )
