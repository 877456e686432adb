"""Precision: Lightning's flags, carried out on shards."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal, get_args

import torch
from lightning.pytorch.plugins import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_effi.config import check_bool
from lightning_effi.sharding.optimizers import LocalStep
from lightning_effi.sharding.plan import Compute
from lightning_effi.sharding.scalars import ReadableShards
from lightning_effi.step.clipping import Stages, clip_gradient_norm, clip_gradient_value, norms_over

PrecisionName = Literal["32-true", "64-true", "bf16-mixed", "bf16-true", "16-mixed", "16-true"]

_NOT_BUILT = ("16-mixed", "16-true")
_SCALER_DEFAULTS = {
    "init_scale": 65536.0,
    "growth_factor": 2.0,
    "backoff_factor": 0.5,
    "growth_interval": 2000,
    "hysteresis": 1,
    "min_scale": 1.0,
    "max_scale": 2.0**24,
}


class EffiPrecision(Precision):
    """Lightning's precision flags for :class:`~lightning_effi.EffiStrategy`.

    ``Trainer(precision="bf16-mixed", strategy=EffiStrategy())`` makes one by itself; pass the plugin to reach its
    further settings. What a flag means is what it means in stock Lightning, whose own plugins do the casting.

    Args:
        precision: ``32-true``, ``64-true``, ``bf16-mixed`` (autocast, parameters in fp32) or ``bf16-true``
            (everything in bf16).
        init_scale: first loss scale (16-bit float only, like the six after it).
        growth_factor: factor by which the scale grows.
        backoff_factor: factor by which the scale shrinks after an overflow.
        growth_interval: steps without overflow before the scale grows.
        hysteresis: overflows before the scale shrinks.
        min_scale: smallest scale.
        max_scale: largest scale.
        keep_fp32: name patterns (``fnmatch``) of modules whose parameters are not computed with in low precision.
        clamp_activations: bound for the outputs of blocks in 16-bit float.
        master_weights: with ``bf16-true``, keep the parameters in fp32 for the optimizer and compute with bf16 copies.

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
        built = [name for name in get_args(PrecisionName) if name not in _NOT_BUILT]
        if precision in _NOT_BUILT:
            raise ValueError(
                f"precision={precision!r} is not carried out by this version of lightning_effi; use 'bf16-mixed' or"
                " 'bf16-true'"
            )
        if precision not in built:
            raise ValueError(f"precision must be one of {', '.join(map(repr, built))}, got {precision!r}")
        given = {
            "init_scale": init_scale,
            "growth_factor": growth_factor,
            "backoff_factor": backoff_factor,
            "growth_interval": growth_interval,
            "hysteresis": hysteresis,
            "min_scale": min_scale,
            "max_scale": max_scale,
        }
        useless = [name for name, value in given.items() if value != _SCALER_DEFAULTS[name]]
        if clamp_activations is not None:
            useless.append("clamp_activations")
        if useless:
            raise ValueError(
                f"{', '.join(useless)} only has an effect with 16-bit float, and precision is {precision!r}: leave it"
                " out"
            )
        check_bool("master_weights", master_weights)
        if master_weights and precision != "bf16-true":
            raise ValueError(
                f"master_weights=True adds an fp32 copy to 'bf16-true'; with precision={precision!r} the parameters are"
                " not held in low precision: leave it out"
            )
        if keep_fp32 and precision != "bf16-mixed" and not master_weights:
            raise ValueError(
                f"keep_fp32 needs parameters held in fp32, and precision={precision!r} has none: use 'bf16-mixed', or"
                " 'bf16-true' with master_weights=True"
            )
        self.precision: PrecisionName = precision  # type: ignore[assignment]
        self.keep_fp32 = tuple(keep_fp32)
        self.master_weights = master_weights
        self._device_type = "cpu"
        self._stock = self._stock_plugin()
        self._local_steps: dict[int, LocalStep] = {}
        self.last_grad_norm: Tensor | None = None
        self.stages: Stages | None = None
        """The pipeline over which norms are taken; set by the strategy."""

    @classmethod
    def from_stock(cls, plugin: Precision) -> EffiPrecision:
        """The counterpart of a plugin that Lightning made from ``Trainer(precision=...)``.

        Raises:
            TypeError: for plugins that bring their own kernels or wrappers.
        """
        if isinstance(plugin, cls):
            return plugin
        if type(plugin) in (Precision, DoublePrecision, HalfPrecision, MixedPrecision):
            return cls(plugin.precision)  # type: ignore[arg-type]
        raise TypeError(
            f"EffiStrategy does not work with the precision plugin {type(plugin).__name__}; use"
            f" Trainer(precision=...) or lightning_effi.EffiPrecision"
        )

    # -- what sharding needs to know ---------------------------------------------------------------------------------

    @property
    def compute(self) -> Compute:
        """Dtypes for gathering parameters and reducing gradients."""
        if self.precision == "bf16-mixed":
            return Compute(torch.bfloat16, reduce_dtype=torch.float32, keep_fp32=self.keep_fp32)
        if self.master_weights:
            # kept modules have fp32 gradients, and one message has one dtype
            reduce_dtype = torch.float32 if self.keep_fp32 else None
            return Compute(torch.bfloat16, everywhere=True, reduce_dtype=reduce_dtype, keep_fp32=self.keep_fp32)
        return Compute()

    def use_device(self, device: torch.device) -> None:
        """The device whose autocast applies."""
        self._device_type = device.type
        self._stock = self._stock_plugin()

    def step_on_shards(self, optimizers: Sequence[Optimizer]) -> None:
        """Let these optimizers update plain local shards where that is known to be the same arithmetic."""
        self._local_steps = {id(opt): LocalStep(opt) for opt in optimizers if LocalStep.serves(opt)}

    def _stock_plugin(self) -> Precision:
        match self.precision:
            case "64-true":
                return DoublePrecision()
            case "bf16-true":
                return HalfPrecision("bf16-true")
            case "bf16-mixed":
                return MixedPrecision("bf16-mixed", self._device_type)
            case _:
                return Precision()

    # -- Lightning's hooks -------------------------------------------------------------------------------------------

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        if not self.master_weights:
            return self._stock.convert_module(module)
        # parameters stay in fp32, as the master copy; whatever the module computes with besides them is low precision
        for buffer in module.buffers():
            if buffer.is_floating_point():
                buffer.data = buffer.data.to(torch.bfloat16)
        return module

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

    @override
    def post_backward(self, tensor: Tensor, module: Any) -> Tensor:  # type: ignore[override]
        with ReadableShards():  # on_after_backward looks at gradients
            return super().post_backward(tensor, module)

    @override
    def _after_closure(self, model: Any, optimizer: Any) -> None:
        with ReadableShards(), norms_over(self.stages):  # on_before_optimizer_step looks at gradients
            super()._after_closure(model, optimizer)

    @override
    def optimizer_step(self, optimizer: Optimizer, model: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:  # type: ignore[override]
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

    @override
    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        self.last_grad_norm = clip_gradient_norm(self.main_params(optimizer), float(clip_val), stages=self.stages)

    @override
    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: int | float) -> None:
        clip_gradient_value(self.main_params(optimizer), float(clip_val))
