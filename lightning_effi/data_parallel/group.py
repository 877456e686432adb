"""One shard group at work: gathering, writing back, reducing. A thin adapter over FSDP2's parameter group."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_effi.compat import dtensor as dtensor_compat
from lightning_effi.compat import fsdp as fsdp_compat
from lightning_effi.compat import torch as torch_compat
from lightning_effi.data_parallel.plan import Compute, ShardGroup
from lightning_effi.modules.parameters import attributes, parameter_places
from lightning_effi.sharded_tensors.functions import gradient_hooks, was_rebound
from lightning_effi.sharded_tensors.stale_parameters import rename
from lightning_effi.sharded_tensors.wholes import make_attributes_whole


class LiveGroup:
    """A :class:`~lightning_effi.data_parallel.plan.ShardGroup` with its FSDP2 parameter group.

    Four methods of FSDP2's group are shadowed here and nowhere else:

    * ``_register_post_backward_hook`` counts the forwards whose backward will come back to this group, so that a
      module that ran several times is reduced once;
    * ``post_backward`` asks us first, so that all ranks reduce in one agreed order;
    * ``wait_for_unshard`` runs outside inference mode, because the full parameters live on and are trained later;
    * ``_to_sharded`` first writes back what a step changed in place in the full parameters (the moving average of a
      teacher, clamped weights), which would otherwise be lost with them.
    """

    def __init__(self, plan: ShardGroup, fsdp_group: Any, compute: Compute, module: nn.Module, regathers: bool) -> None:
        """``module``: the whole one, which names parameters. ``regathers``: backward gathers afresh (stage 3)."""
        self.name = plan.module
        self._module = module
        self._group = fsdp_group
        self._params = fsdp_compat.params(fsdp_group)
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        self.parameter_names = [names[id(parameter)] for parameter in self.parameters]
        self._run_post_backward = fsdp_group.post_backward
        self._wait_for_unshard = fsdp_group.wait_for_unshard
        self._to_sharded = fsdp_group._to_sharded
        self._register = fsdp_group._register_post_backward_hook
        self.is_in_step = False
        self._run_unshard = fsdp_group.unshard
        self._shard_versions: list[int] = []
        self._linked: set[int] = set()
        self._hooked: set[int] = set()
        self._awaited = 0
        self._regathers = regathers
        fsdp_compat.override(fsdp_group, "_register_post_backward_hook", self._register_and_count)
        fsdp_compat.override(fsdp_group, "unshard", self._follow_and_unshard)
        fsdp_compat.override(fsdp_group, "wait_for_unshard", self._wait_outside_inference_mode)
        fsdp_compat.override(fsdp_group, "_to_sharded", self._write_back_and_shard)
        for param in self._params:
            fsdp_compat.refuse_assigned(param)
        dtypes = [compute.dtype if name in plan.low_precision else None for name in self.parameter_names]
        fsdp_compat.set_compute_dtypes(fsdp_group, dtypes, compute.reduce_dtype)

    def on_post_backward(self, callback: Callable[[LiveGroup], None]) -> None:
        """Call ``callback(self)`` whenever autograd has finished with one use of this group's parameters."""

        def post_backward(*_unused: Any) -> None:
            if self.is_in_step:
                return  # torch.autograd.grad: the backward of the step's loss is still to come
            self._awaited -= 1
            callback(self)

        fsdp_compat.override(self._group, "post_backward", post_backward)

    @property
    def is_awaited(self) -> bool:
        """Whether autograd will come back to this group in the current backward."""
        return self._awaited > 0

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The sharded parameters."""
        return [fsdp_compat.sharded_param(param) for param in self._params]

    def full_parameters(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        """Full parameters as far as they came to be, each with the sharded one."""
        pairs = [(fsdp_compat.unsharded_param(p), fsdp_compat.sharded_param(p)) for p in self._params]
        return [(full, shard) for full, shard in pairs if full is not None]

    @property
    def is_sharded(self) -> bool:
        return self._group.is_sharded

    @property
    def reduces(self) -> bool:
        """Whether the current backward ends in a reduction (it does not inside an accumulation window)."""
        return self._group.reduce_grads

    def configure(self, *, reduce: bool, reshard: bool) -> None:
        """What the next backward does with this group: reduce its gradients, free its full parameters."""
        fsdp_compat.configure_backward(self._group, reduce=reduce, reshard=reshard)

    def gather(self) -> None:
        """Start gathering the full parameters; :meth:`wait` must follow."""
        self._group.unshard(async_op=True)

    def wait(self) -> None:
        """Put the full parameters into the module."""
        self._group.wait_for_unshard()

    def shard(self) -> None:
        """Put the shards back into the module and free the full parameters."""
        if not self._group.is_sharded:
            self._group._to_sharded()

    def with_gradient(self) -> list[bool]:
        """For each parameter, whether this rank holds a gradient for it that was not reduced yet."""
        return [fsdp_compat.has_unreduced_grad(param) for param in self._params]

    def reduce(self) -> None:
        """Reduce-scatter the gradients of all trainable parameters; absent ones take part as zeros."""
        for param in self._params:
            fsdp_compat.zero_unreduced_grad(param)
            fsdp_compat.upcast_unreduced_grad(param)
        self._run_post_backward()

    def set_aside(self) -> None:
        """Add the gradients of one backward to those of the backwards before it, in the reduction's dtype."""
        for param in self._params:
            fsdp_compat.upcast_unreduced_grad(param)

    def keep_unreduced(self) -> None:
        """End this group's part of a backward that does not reduce (FSDP2 accumulates the full gradients)."""
        self._run_post_backward()

    def finish(self) -> None:
        """Wait until the reduced gradients can be read."""
        fsdp_compat.post_backward_done(self._group)

    def settle(self) -> None:
        """Forget everything FSDP2 noted about forwards without a backward."""
        self._awaited = 0
        fsdp_compat.reset_idle(self._group)
        fsdp_compat.forget_forward_order(self._group)

    def drop_unreduced(self, sharded: set[int]) -> None:
        """Forget unreduced gradients of the parameters whose ``id`` is in ``sharded``."""
        for param in self._params:
            if id(fsdp_compat.sharded_param(param)) in sharded:
                fsdp_compat.drop_unreduced_grad(param)

    def scale_unreduced(self, factor: float) -> None:
        """Multiply the gradients that were not reduced yet."""
        for param in self._params:
            fsdp_compat.scale_unreduced_grad(param, factor)

    def sync_requires_grad(self) -> None:
        """Let the full parameters follow a ``requires_grad`` that was set on the sharded ones."""
        for param in self._params:
            fsdp_compat.sync_requires_grad(param)

    def _register_and_count(self, args: Any, kwargs: Any) -> Any:
        registered = self._register(args, kwargs)
        if registered[0] is not args or registered[1] is not kwargs:
            self._awaited += 1
        return registered

    def _follow_and_unshard(self, async_op: bool = False) -> None:
        """Gather what the module's own code made of the sharded parameters."""
        if self._group.is_sharded:
            self.follow_names()
            for param, name in zip(self._params, self.parameter_names, strict=True):
                if not fsdp_compat.is_in_place(param, fsdp_compat.sharded_param(param)):
                    raise RuntimeError(
                        f"the parameter '{name}' was replaced by another after the module was sharded, which the"
                        " optimizer and the other ranks know nothing of. Write into it (under torch.no_grad(),"
                        " parameter.copy_(value)), or replace it in __init__, setup() or configure_model()"
                    )
                if was_rebound(fsdp_compat.sharded_param(param)):
                    fsdp_compat.follow_data(param)
        self._run_unshard(async_op)

    def _link_full_parameters(self) -> None:
        """Full parameters have the attributes of the sharded ones, and the hooks on their gradients."""
        for full, shard in self.full_parameters():
            if id(full) not in self._linked:
                self._linked.add(id(full))
                full.__dict__.update(attributes(shard))
            hooks = gradient_hooks(shard)
            if hooks and full.requires_grad and id(full) not in self._hooked:
                self._hooked.add(id(full))
                full.register_hook(partial(_call_all, hooks))

    def _wait_outside_inference_mode(self) -> None:
        was_sharded = self._group.is_sharded
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False), torch.no_grad():
                self._wait_for_unshard()
        else:
            self._wait_for_unshard()
        if was_sharded and not self._group.is_sharded:
            self._link_full_parameters()
            self._shard_versions = [dtensor_compat.local_tensor(p)._version for p in self.parameters]

    def follow_names(self) -> None:
        """Find parameters that the module's own code has registered elsewhere, under another name, since last time.

        Pruning makes ``weight_orig`` of ``weight``, ``register_parametrization`` moves it into a module of its own.
        """
        sharded = self._group.is_sharded
        shown = [fsdp_compat.sharded_param(p) if sharded else fsdp_compat.unsharded_param(p) for p in self._params]
        moved = [i for i, param in enumerate(self._params) if not fsdp_compat.is_in_place(param, shown[i])]
        if not moved:
            return
        places = parameter_places(self._module)
        for index in moved:
            if found := places.get(id(shown[index])):
                param = self._params[index]
                before = fsdp_compat.places(param)
                fsdp_compat.move(param, [(module, name) for module, name, _ in found])
                self.parameter_names[index] = found[0][2]
                rename(fsdp_compat.sharded_param(param), self._module, found[0][2])
                for module, _ in before:
                    make_attributes_whole(module)

    def _write_back_and_shard(self) -> None:
        self.follow_names()
        # what backward gathered came from the shards, and nobody writes into it
        if not self._group.is_sharded and not (self._regathers and torch_compat.in_backward()):
            self._write_back()
        for param in self._params:
            fsdp_compat.relink(param)
        self._to_sharded()

    @torch.no_grad()
    def _write_back(self) -> None:
        for param, version in zip(self._params, self._shard_versions, strict=True):
            shard = dtensor_compat.local_tensor(fsdp_compat.sharded_param(param))
            if shard._version != version:
                continue  # the optimizer moved the shard meanwhile; the full parameter is the stale one
            chunk = fsdp_compat.local_chunk(param)
            if chunk is None or not chunk.numel():
                continue
            if chunk.dtype == shard.dtype:
                shard.copy_(chunk)
            else:  # keep the bits that the lower precision does not hold wherever nothing was written
                shard.copy_(torch.where(shard.to(chunk.dtype) == chunk, shard, chunk.to(shard.dtype)))


def _call_all(hooks: Mapping[int, Callable[[Tensor], Tensor | None]], gradient: Tensor) -> Tensor:
    for hook in list(hooks.values()):
        changed = hook(gradient)
        gradient = gradient if changed is None else changed
    return gradient
