"""Private names of FSDP2.

A "group" below is a ``torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_effi.compat.dtensor import local_tensor, rebind_local


def groups(module: nn.Module) -> list[Any]:
    """All FSDP2 parameter groups below ``module``, in ``modules()`` order, each once."""
    from torch.distributed.fsdp import FSDPModule

    groups: dict[int, Any] = {}
    for submodule in module.modules():
        if isinstance(submodule, FSDPModule):
            for group in submodule._get_fsdp_state()._fsdp_param_groups:
                groups[id(group)] = group
    return list(groups.values())


def initialize(root: nn.Module) -> None:
    """Make ``root`` the FSDP2 root now, instead of whichever module happens to run first."""
    root._get_fsdp_state()._lazy_init()  # type: ignore[operator, union-attr]


def take_off_hooks(root: nn.Module) -> None:
    """Leave gathering and reducing below ``root`` to whoever drives the parameter groups."""
    from torch.distributed.fsdp import FSDPModule

    for module in root.modules():
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            state._pre_forward_hook_handle.remove()
            state._post_forward_hook_handle.remove()


def override(group: Any, method: str, replacement: Callable[..., Any]) -> None:
    """Shadow a method of one FSDP2 parameter group; the class stays as it is."""
    getattr(type(group), method)  # fails by name if torch renamed it
    setattr(group, method, replacement)


def params(group: Any) -> list[Any]:
    """The ``FSDPParam`` of each parameter in the group."""
    return list(group.fsdp_params)


def sharded_param(param: Any) -> nn.Parameter:
    """The DTensor parameter that the optimizer sees."""
    return param.sharded_param


def unsharded_param(param: Any) -> nn.Parameter | None:
    """The full parameter that the forward uses; ``None`` before the first all-gather."""
    return getattr(param, "_unsharded_param", None)


def has_unreduced_grad(param: Any) -> bool:
    """Whether a gradient of the full parameter waits for its reduce-scatter."""
    unsharded = unsharded_param(param)
    return param.unsharded_accumulated_grad is not None or (unsharded is not None and unsharded.grad is not None)


def drop_unreduced_grad(param: Any) -> None:
    """Forget a gradient that was not reduced yet (``zero_grad`` only reaches the sharded one)."""
    param.unsharded_accumulated_grad = None
    unsharded = unsharded_param(param)
    if unsharded is not None:
        unsharded.grad = None


def scale_unreduced_grad(param: Any, factor: float) -> None:
    """Multiply a gradient that was not reduced yet, in place."""
    unsharded = unsharded_param(param)
    for grad in (param.unsharded_accumulated_grad, None if unsharded is None else unsharded.grad):
        if grad is not None:
            local_tensor(grad).mul_(factor)


def zero_unreduced_grad(param: Any) -> None:
    """Give a trainable full parameter without gradient a gradient of zeros, so that it takes part in the reduction."""
    unsharded = unsharded_param(param)
    if unsharded is not None and unsharded.requires_grad and not has_unreduced_grad(param):
        unsharded.grad = torch.zeros_like(unsharded)


def upcast_unreduced_grad(param: Any) -> None:
    """Bring an unreduced gradient to the reduction's dtype, so that one message can hold all of a group's."""
    param.accumulate_unsharded_grad_if_needed()
    if unsharded_param(param) is not None:
        param.to_accumulated_grad_if_needed()


def set_compute_dtypes(group: Any, dtypes: list[torch.dtype | None], reduce_dtype: torch.dtype | None) -> None:
    """Gather each parameter of a group in its own dtype; ``None`` keeps the stored one.

    FSDP2 has one ``MixedPrecisionPolicy`` per group but carries the dtypes per parameter, and its all-gather accepts
    mixed ones; with a policy per parameter, norms stay in fp32 without a second message per block.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy

    original = group._init_mp_dtypes
    policies = [MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduce_dtype) for dtype in dtypes]

    def init_mp_dtypes() -> None:
        original()
        for param, policy in zip(group.fsdp_params, policies, strict=True):
            param.init_dtype_attrs(policy)
        if reduce_dtype is not None:
            group._reduce_dtype = reduce_dtype

    override(group, "_init_mp_dtypes", init_mp_dtypes)


def sync_requires_grad(param: Any) -> None:
    """Carry ``requires_grad`` from the sharded parameter to the full one that the module currently shows."""
    unsharded = unsharded_param(param)
    if unsharded is not None and unsharded.requires_grad != param.sharded_param.requires_grad:
        unsharded.requires_grad_(param.sharded_param.requires_grad)


def local_chunk(param: Any) -> Tensor | None:
    """This rank's part of the full parameter, as a view with the shape of the local shard."""
    unsharded = unsharded_param(param)
    if unsharded is None:
        return None
    local = param.sharded_param._local_tensor
    full = unsharded._local_tensor if hasattr(unsharded, "_local_tensor") else unsharded
    dim = param.fsdp_placement.dim
    start = param.padded_sharded_param_size[dim] * param.mesh_info.shard_mesh_rank
    return full.detach().narrow(dim, min(start, full.size(dim)), local.size(dim) if local.numel() else 0)


def follow_data(param: Any) -> None:
    """The sharded parameter was given other memory: gather that from now on (``FSDPParam.reset_sharded_param``)."""
    param.reset_sharded_param()


def relink(param: Any) -> None:
    """Let the full parameter be the gathered memory again, after ``parameter.data = ...`` gave it other memory."""
    unsharded = unsharded_param(param)
    if unsharded is None or len(param.all_gather_outputs) != 1:
        return
    [gathered], full = param.all_gather_outputs, local_tensor(unsharded)
    if full.untyped_storage()._cdata != gathered.untyped_storage()._cdata:
        view = torch.as_strided(gathered, full.shape, torch.empty(full.shape, device="meta").stride(), 0)
        if full is unsharded:
            unsharded.data = view
        else:
            rebind_local(unsharded, view)


def is_in_place(param: Any, shown: nn.Parameter | None) -> bool:
    """Whether the module has ``shown``, which is the sharded or the full parameter, wherever FSDP2 put it."""
    return all(module._parameters.get(name) is shown for module, name in places(param))


def places(param: Any) -> list[tuple[nn.Module, str]]:
    """Modules that hold a parameter, each with its name there; several if it is tied."""
    info = param._module_info
    return [(info.module, info.param_name), *zip(info.shared_modules, info.shared_param_names, strict=True)]


def move(param: Any, found: list[tuple[nn.Module, str]]) -> None:
    """From here on, put the sharded and the full parameter into these places of the module."""
    info = param._module_info
    (info.module, info.param_name), *shared = found
    info.shared_modules[:] = [module for module, _ in shared]
    info.shared_param_names[:] = [name for _, name in shared]


def configure_backward(group: Any, *, reduce: bool, reshard: bool) -> None:
    """``FSDPModule.set_requires_gradient_sync`` and ``set_reshard_after_backward`` without their walk over modules."""
    group.reduce_grads = group.all_reduce_grads = reduce
    group.reshard_after_backward = reshard


def own_class(module: nn.Module, made: dict[type, type]) -> None:
    """Give a sharded module a class with the name of its original one, which summaries and error messages show.

    The class that ``fully_shard`` makes is shared by all modules of the process that were of one class, and stays as it
    is; ours derives from it.

    Args:
        module: its class was changed by ``fully_shard`` just now.
        made: our classes so far by FSDP2's, to which this may add one.
    """
    shared, original = type(module), original_class(module)
    if shared not in made:
        named = {"__module__": original.__module__, "__qualname__": original.__qualname__, "__doc__": original.__doc__}
        made[shared] = type(original.__name__, (shared,), named)
    module.__class__ = made[shared]


def original_class(module: nn.Module) -> type:
    """What a module's class was before it was sharded."""
    from torch.distributed.fsdp import FSDPModule

    kinds = type(module).__mro__
    return kinds[kinds.index(FSDPModule) + 1] if FSDPModule in kinds else kinds[0]


def is_involved(module: nn.Module) -> bool:
    """Whether FSDP2 has sharded ``module`` itself, or a parameter that it holds."""
    from torch.distributed.fsdp import FSDPModule

    return isinstance(module, FSDPModule) or any(hasattr(p, "device_mesh") for p in module._parameters.values())


def attribute_names() -> set[str]:
    """What ``fully_shard`` puts into ``module.__dict__``, hooks apart."""
    from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY

    return {STATE_KEY, REGISTRY_KEY, "_is_fsdp_managed_module", "_fsdp_use_orig_params"}


def hook_keys(root: nn.Module) -> set[int]:
    """By which keys the modules below ``root`` hold FSDP2's hooks."""
    from torch.distributed.fsdp import FSDPModule

    sharded = [module for module in root.modules() if isinstance(module, FSDPModule)]
    return {handle.id for module in sharded for handle in _hook_handles(module)}


def _hook_handles(module: Any) -> list[Any]:
    """Of the hooks that FSDP2 keeps on ``module`` and, for its parameters, on the modules below."""
    state = module._get_fsdp_state()
    handles = [state._pre_forward_hook_handle, state._post_forward_hook_handle]
    for group in state._fsdp_param_groups:
        handles += group._module_to_pre_save_state_dict_hook_handle.values()
        handles += group._module_to_pre_load_state_dict_hook_handle.values()
        handles += [param._post_load_hook_handle for param in group.fsdp_params]
    return handles


def refuse_assigned(param: Any) -> None:
    """Say what to do instead where ``load_state_dict(assign=True)`` puts a plain tensor into a sharded module."""
    original = param.reset_sharded_param

    def reset_sharded_param() -> None:
        info = param._module_info
        if not hasattr(info.module._parameters[info.param_name], "device_mesh"):
            raise RuntimeError(
                f"load_state_dict(assign=True) has replaced the parameter '{info.param_name}' of"
                f" {type(info.module).__name__} after it was sharded. Leave assign=True out, which copies the values"
            )
        original()

    param.reset_sharded_param = reset_sharded_param


def post_backward_done(group: Any) -> None:
    """Wait for the group's reduction and let the gradients be read (``FSDPParamGroup.finalize_backward``)."""
    group.finalize_backward()


def forget_forward_order(group: Any) -> None:
    """Drop the record of forwards that no backward will follow; it would grow through a whole evaluation."""
    group.comm_ctx.post_forward_order.clear()
    group._post_forward_indices.clear()


def reset_idle(group: Any) -> None:
    """Mark a group idle after its reduction was run by hand outside autograd."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

    group._training_state = TrainingState.IDLE


def undo(root: nn.Module, full: dict[int, Tensor]) -> None:
    """Make every module below ``root`` an ordinary one again; FSDP2 has no way back of its own.

    Args:
        root: the FSDP2 root.
        full: the value of each sharded parameter by its ``id``; becomes the data of a plain parameter.
    """
    from torch.distributed._composable_state import _module_state_mapping
    from torch.distributed.fsdp import FSDPModule

    for module in list(root.modules()):
        if isinstance(module, FSDPModule):
            for handle in _hook_handles(module):
                handle.remove()
            for group in module._get_fsdp_state()._fsdp_param_groups:
                _let_groups_go(group)
                for param in group.fsdp_params:
                    sharded = param.sharded_param
                    param._setattr_on_modules(nn.Parameter(full[id(sharded)], sharded.requires_grad))
            module.__class__ = original_class(module)
            del _module_state_mapping[module]
        for name in attribute_names():
            module.__dict__.pop(name, None)


def is_known(module: nn.Module) -> bool:
    """Whether FSDP2 has begun to shard ``module`` (``_composable_state._module_state_mapping``)."""
    from torch.distributed._composable_state import _module_state_mapping

    return module in _module_state_mapping


def forget(module: nn.Module) -> None:
    """Of a module whose class, attributes and hooks are put back otherwise: let FSDP2 know nothing of it."""
    from torch.distributed._composable_state import _get_module_state, _module_state_mapping

    if is_known(module):
        for group in getattr(_get_module_state(module), "_fsdp_param_groups", ()):
            _let_groups_go(group)
        del _module_state_mapping[module]


def _let_groups_go(group: Any) -> None:
    """FSDP2's objects hold each other in cycles for a while; process groups that they hold cannot be destroyed."""
    for info in filter(None, (group.mesh_info, group.post_forward_mesh_info)):
        for name in ("shard_process_group", "replicate_process_group"):
            vars(info).pop(name, None)
