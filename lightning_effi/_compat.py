"""Every private name of torch and Lightning that the package relies on, behind a function of our own.

Checked with torch 2.13 and 2.14 and Lightning 2.6. ``tests/test_compat.py`` exercises each function, so that a
release that changes one of them fails there, with the name, and not in the middle of somebody's run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.strategies.launchers.multiprocessing import _MultiProcessingLauncher as MultiProcessingLauncher
from torch import Tensor, nn

__all__ = ["MultiProcessingLauncher"]  # starts processes by fork or spawn and brings rank 0's results back

if TYPE_CHECKING:
    from datetime import timedelta

    import lightning.pytorch as pl
    from lightning.fabric.plugins.environments import ClusterEnvironment
    from lightning.pytorch.strategies.launchers.launcher import _Launcher
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

# --------------------------------------------------------------------------------------------------------------------
# torch: process groups and meshes


def flatten_mesh(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """One axis named ``name`` over all ranks of ``mesh`` (``DeviceMesh._flatten``, torch 2.13-2.14)."""
    return mesh._flatten(name)


def broadcast_module_states(tensors: list[Tensor], group: Any, src: int = 0) -> None:
    """Send rank ``src``'s values of ``tensors`` to all ranks of ``group``, in buckets of 250 MB.

    ``dist._broadcast_coalesced`` is what DistributedDataParallel uses to make replicas equal; ``src`` is the rank
    inside the group.
    """
    import torch.distributed as dist

    dist._broadcast_coalesced(group, tensors, 250 * 1024 * 1024, src)


# Inside this context, tensor subclasses are treated as plain tensors by torch functions.
without_subclass_dispatch = torch._C.DisableTorchFunctionSubclass

# An operator below autograd, as dispatch modes call it: ``torch.ops.aten.mul.Tensor``.
Operator = torch._ops.OpOverload


def all_gather_rows(output: Tensor, rows: Tensor, group: Any) -> None:
    """``dist.all_gather_into_tensor``, which torch 2.14 renamed to ``all_gather_single``."""
    import torch.distributed as dist

    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(output, rows, group=group)


def reduce_scatter_rows(output: Tensor, rows: Tensor, group: Any) -> None:
    """``dist.reduce_scatter_tensor``, which torch 2.14 renamed to ``reduce_scatter_single``."""
    import torch.distributed as dist

    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    scatter(output, rows, group=group)


def quiet_sequential_gathers() -> None:
    """Drop torch's advice against gathering a tensor that is sharded over two axes of a mesh.

    FSDP2 makes such tensors of tensor-parallel ones, and checkpoints gather them; there is nothing that a user could
    change about it.
    """
    import logging

    logger = logging.getLogger("torch.distributed.tensor._redistribute")
    if not any(isinstance(f, _SequentialGathers) for f in logger.filters):
        logger.addFilter(_SequentialGathers())


class _SequentialGathers:
    def filter(self, record: Any) -> bool:
        return "sequential all_gather operations" not in record.getMessage()


def unscale_and_check(gradients: list[Tensor], overflow: Tensor, inverse: Tensor) -> None:
    """Multiply tensors of one device and dtype with ``inverse`` and set ``overflow`` to 1 where they are not finite.

    The kernel of ``torch.amp.GradScaler``, which reads each gradient once (two 0-dim fp32 tensors on that device).
    """
    torch._amp_foreach_non_finite_check_and_unscale_(gradients, overflow, inverse)


def in_backward() -> bool:
    """Whether autograd is running a backward in this thread (``torch._C._current_graph_task_id``)."""
    return torch._C._current_graph_task_id() != -1


# --------------------------------------------------------------------------------------------------------------------
# torch: FSDP2. A "group" below is a torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup.


def fsdp_groups(module: nn.Module) -> list[Any]:
    """All FSDP2 parameter groups below ``module``, in ``modules()`` order, each once."""
    from torch.distributed.fsdp import FSDPModule

    groups: dict[int, Any] = {}
    for submodule in module.modules():
        if isinstance(submodule, FSDPModule):
            for group in submodule._get_fsdp_state()._fsdp_param_groups:
                groups[id(group)] = group
    return list(groups.values())


def fsdp_initialize(root: nn.Module) -> None:
    """Make ``root`` the FSDP2 root now, instead of whichever module happens to run first."""
    root._get_fsdp_state()._lazy_init()  # type: ignore[operator, union-attr]


def fsdp_take_off_hooks(root: nn.Module) -> None:
    """Leave gathering and reducing below ``root`` to whoever drives the parameter groups."""
    from torch.distributed.fsdp import FSDPModule

    for module in root.modules():
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            state._pre_forward_hook_handle.remove()
            state._post_forward_hook_handle.remove()


def fsdp_override(group: Any, method: str, replacement: Callable[..., Any]) -> None:
    """Shadow a method of one FSDP2 parameter group; the class stays as it is."""
    getattr(type(group), method)  # fails by name if torch renamed it
    setattr(group, method, replacement)


def fsdp_params(group: Any) -> list[Any]:
    """The ``FSDPParam`` of each parameter in the group."""
    return list(group.fsdp_params)


def fsdp_sharded_param(param: Any) -> nn.Parameter:
    """The DTensor parameter that the optimizer sees."""
    return param.sharded_param


def fsdp_unsharded_param(param: Any) -> nn.Parameter | None:
    """The full parameter that the forward uses; ``None`` before the first all-gather."""
    return getattr(param, "_unsharded_param", None)


def fsdp_has_unreduced_grad(param: Any) -> bool:
    """Whether a gradient of the full parameter waits for its reduce-scatter."""
    unsharded = fsdp_unsharded_param(param)
    return param.unsharded_accumulated_grad is not None or (unsharded is not None and unsharded.grad is not None)


def fsdp_drop_unreduced_grad(param: Any) -> None:
    """Forget a gradient that was not reduced yet (``zero_grad`` only reaches the sharded one)."""
    param.unsharded_accumulated_grad = None
    unsharded = fsdp_unsharded_param(param)
    if unsharded is not None:
        unsharded.grad = None


def fsdp_scale_unreduced_grad(param: Any, factor: float) -> None:
    """Multiply a gradient that was not reduced yet, in place."""
    unsharded = fsdp_unsharded_param(param)
    for grad in (param.unsharded_accumulated_grad, None if unsharded is None else unsharded.grad):
        if grad is not None:
            local_tensor(grad).mul_(factor)


def fsdp_zero_unreduced_grad(param: Any) -> None:
    """Give a trainable full parameter without gradient a gradient of zeros, so that it takes part in the reduction."""
    unsharded = fsdp_unsharded_param(param)
    if unsharded is not None and unsharded.requires_grad and not fsdp_has_unreduced_grad(param):
        unsharded.grad = torch.zeros_like(unsharded)


def fsdp_upcast_unreduced_grad(param: Any) -> None:
    """Bring an unreduced gradient to the reduction's dtype, so that one message can hold all of a group's."""
    param.accumulate_unsharded_grad_if_needed()
    if fsdp_unsharded_param(param) is not None:
        param.to_accumulated_grad_if_needed()


def fsdp_set_compute_dtypes(group: Any, dtypes: list[torch.dtype | None], reduce_dtype: torch.dtype | None) -> None:
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

    fsdp_override(group, "_init_mp_dtypes", init_mp_dtypes)


def fsdp_sync_requires_grad(param: Any) -> None:
    """Carry ``requires_grad`` from the sharded parameter to the full one that the module currently shows."""
    unsharded = fsdp_unsharded_param(param)
    if unsharded is not None and unsharded.requires_grad != param.sharded_param.requires_grad:
        unsharded.requires_grad_(param.sharded_param.requires_grad)


def fsdp_local_chunk(param: Any) -> Tensor | None:
    """This rank's part of the full parameter, as a view with the shape of the local shard."""
    unsharded = fsdp_unsharded_param(param)
    if unsharded is None:
        return None
    local = param.sharded_param._local_tensor
    full = unsharded._local_tensor if hasattr(unsharded, "_local_tensor") else unsharded
    dim = param.fsdp_placement.dim
    start = param.padded_sharded_param_size[dim] * param.mesh_info.shard_mesh_rank
    return full.detach().narrow(dim, min(start, full.size(dim)), local.size(dim) if local.numel() else 0)


def fsdp_follow_data(param: Any) -> None:
    """The sharded parameter was given other memory: gather that from now on (``FSDPParam.reset_sharded_param``)."""
    param.reset_sharded_param()


def fsdp_relink(param: Any) -> None:
    """Let the full parameter be the gathered memory again, after ``parameter.data = ...`` gave it other memory."""
    unsharded = fsdp_unsharded_param(param)
    if unsharded is None or len(param.all_gather_outputs) != 1:
        return
    [gathered], full = param.all_gather_outputs, local_tensor(unsharded)
    if full.untyped_storage()._cdata != gathered.untyped_storage()._cdata:
        view = torch.as_strided(gathered, full.shape, torch.empty(full.shape, device="meta").stride(), 0)
        if full is unsharded:
            unsharded.data = view
        else:
            rebind_local(unsharded, view)


def fsdp_is_in_place(param: Any) -> bool:
    """Whether the module still has the sharded parameter where FSDP2 put it."""
    info = param._module_info
    return info.module._parameters.get(info.param_name) is param.sharded_param


def fsdp_configure_backward(group: Any, *, reduce: bool, reshard: bool) -> None:
    """``FSDPModule.set_requires_gradient_sync`` and ``set_reshard_after_backward`` without their walk over modules."""
    group.reduce_grads = group.all_reduce_grads = reduce
    group.reshard_after_backward = reshard


def fsdp_keep_class_name(module: nn.Module) -> None:
    """Undo the renaming of a sharded module's class, which summaries and error messages show."""
    sharded, original = type(module), type(module).__mro__[2]
    sharded.__name__, sharded.__qualname__ = original.__name__, original.__qualname__


def fsdp_refuse_copies(module: nn.Module) -> None:
    """Say what to do instead where a sharded module is copied, which FSDP2 refuses."""

    def __deepcopy__(self: Any, memo: Any) -> Any:
        raise RuntimeError(
            f"a copy of {type(self).__name__} was asked for after its parameters were sharded, which leaves a part of"
            " each on this rank. Copy it in __init__, setup() or configure_model(); or keep copies of the parameters,"
            " {name: p.detach().clone() for name, p in self.named_parameters()}, which may be averaged and copied back"
        )

    type(module).__deepcopy__ = __deepcopy__  # type: ignore[attr-defined]


def fsdp_refuse_assigned(param: Any) -> None:
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


def fsdp_post_backward_done(group: Any) -> None:
    """Wait for the group's reduction and let the gradients be read (``FSDPParamGroup.finalize_backward``)."""
    group.finalize_backward()


def fsdp_forget_forward_order(group: Any) -> None:
    """Drop the record of forwards that no backward will follow; it would grow through a whole evaluation."""
    group.comm_ctx.post_forward_order.clear()
    group._post_forward_indices.clear()


def fsdp_reset_idle(group: Any) -> None:
    """Mark a group idle after its reduction was run by hand outside autograd."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

    group._training_state = TrainingState.IDLE


def fsdp_undo(root: nn.Module, full: dict[int, Tensor]) -> None:
    """Make every module below ``root`` an ordinary one again; FSDP2 has no way back of its own.

    Args:
        root: the FSDP2 root.
        full: the value of each sharded parameter by its ``id``; becomes the data of a plain parameter.
    """
    from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
    from torch.distributed._composable_state import _module_state_mapping
    from torch.distributed.fsdp import FSDPModule

    for module in list(root.modules()):
        for key in ("_is_fsdp_managed_module", "_fsdp_use_orig_params"):
            module.__dict__.pop(key, None)
        if not isinstance(module, FSDPModule):
            continue
        state = module._get_fsdp_state()
        state._pre_forward_hook_handle.remove()
        state._post_forward_hook_handle.remove()
        for group in state._fsdp_param_groups:
            for handles in (
                group._module_to_pre_save_state_dict_hook_handle,
                group._module_to_pre_load_state_dict_hook_handle,
            ):
                for handle in handles.values():
                    handle.remove()
            for param in group.fsdp_params:
                sharded = param.sharded_param
                param._post_load_hook_handle.remove()
                param._setattr_on_modules(nn.Parameter(full[id(sharded)], sharded.requires_grad))
        module.__class__ = type(module).__mro__[2]
        del _module_state_mapping[module]
        del module.__dict__[STATE_KEY], module.__dict__[REGISTRY_KEY]


def read_scalars_globally() -> None:
    """Let reading a sharded scalar (``.item()``, ``float()``, an f-string ...) give its global value on every rank.

    The norm of a sharded gradient is a partial result; torch 2.13-2.14 silently reads this rank's part of it, and
    refuses to format it or to hand it to NumPy. What is set here is process-wide and changes nothing for plain tensors;
    like every use of a sharded value, reading one is something that all ranks must do.
    """
    from torch.distributed.tensor import DTensor

    def read(operator: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
        return operator(args[0].full_tensor())

    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    handlers[torch.ops.aten._local_scalar_dense.default] = read

    def reads_whole(name: str) -> Callable[..., Any]:
        return lambda self, *args, **kwargs: getattr(self.full_tensor(), name)(*args, **kwargs)

    for name in ("__format__", "numpy", "tolist"):
        setattr(DTensor, name, reads_whole(name))


def log_scalars_globally() -> None:
    """Let ``self.log`` keep the global value of a sharded scalar instead of the scalar itself.

    Progress bars read logged values on the first rank alone; of a partial result that read would be a collective that
    the other ranks do not enter, and the run would hang. Process-wide, and without effect on plain tensors.
    """
    from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultMetric
    from torch.distributed.tensor import DTensor

    original = _ResultMetric.update
    if hasattr(original, "reads_dtensors"):
        return

    def update(self: Any, value: Any, batch_size: int) -> None:
        original(self, value.full_tensor() if isinstance(value, DTensor) else value, batch_size)

    update.reads_dtensors = True  # type: ignore[attr-defined]
    _ResultMetric.update = update  # type: ignore[method-assign]


def functions_of_dtensors(run: Callable[..., Any]) -> None:
    """Let ``run(func, args, kwargs)`` carry out every torch function that is given a DTensor.

    DTensors take part in torch functions as plain tensors do (``_disabled_torch_function_impl``) until their operators
    are dispatched, where it is too late to know a view from a copy. Process-wide; inside ``run`` it is as before.
    """
    from torch.distributed.tensor import DTensor

    def __torch_function__(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not all(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # other subclasses know what to do with DTensors
        with without_subclass_dispatch():
            return run(func, args, kwargs or {})

    DTensor.__torch_function__ = classmethod(__torch_function__)  # type: ignore[assignment]


def rebind_local(tensor: Tensor, local: Tensor) -> None:
    """Let a DTensor have other memory for this rank's part (``DTensor._local_tensor``)."""
    tensor._local_tensor = local.detach()  # type: ignore[attr-defined]


def is_sharded(placement: Any) -> bool:
    """Whether ranks along this axis hold different parts of a DTensor.

    FSDP2 over a dim that tensor parallelism has cut already gives ``_StridedShard``, of which ``is_shard()`` is false.
    """
    from torch.distributed.tensor.placement_types import _StridedShard

    return bool(placement.is_shard()) or isinstance(placement, _StridedShard)


def local_tensor(tensor: Tensor) -> Tensor:
    """The part of a DTensor on this rank, without autograd (``DTensor._local_tensor``); a plain tensor as it is."""
    return getattr(tensor, "_local_tensor", tensor)


def wrap_local(local: Tensor, like: DTensor) -> DTensor:
    """A DTensor around ``local`` with the mesh, placements and global shape of ``like``; no communication."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


@contextmanager
def total_norm_replaced(replacement: Callable[..., Tensor] | None) -> Iterator[None]:
    """Let ``torch.nn.utils.clip_grad_norm_`` take the norm of its gradients from ``replacement(gradients, norm_type)``.

    However a module has imported that function, it looks up ``_get_total_norm`` in its own module (torch 2.13-2.14).
    """
    from torch.nn.utils import clip_grad

    original = clip_grad._get_total_norm

    def total_norm(
        tensors: Any, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
    ) -> Tensor:
        assert replacement is not None
        norm = replacement([tensors] if isinstance(tensors, Tensor) else list(tensors), float(norm_type))
        if error_if_nonfinite and not bool(norm.isfinite()):
            raise RuntimeError(
                f"The total norm of order {norm_type} for gradients is non-finite, so it cannot be clipped"
            )
        return norm

    if replacement is not None:
        clip_grad._get_total_norm = total_norm  # type: ignore[assignment]
    try:
        yield
    finally:
        clip_grad._get_total_norm = original


# --------------------------------------------------------------------------------------------------------------------
# torch: fake tensors


def fake_tensor_mode() -> Any:
    """Tensors with shapes and dtypes but no values (``torch._subclasses.FakeTensorMode``)."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def fake_mode_of(value: Any) -> Any:
    """The mode in which a tensor without values was made; ``None`` for all else."""
    from torch._subclasses.fake_tensor import FakeTensor

    return value.fake_mode if isinstance(value, FakeTensor) else None


# --------------------------------------------------------------------------------------------------------------------
# torch: a module's call, which runs its hooks around ``forward``


def shadow_call(module: nn.Module, call: Callable[..., Any]) -> None:
    """Let ``module(...)`` be ``call(...)``, hooks included."""
    module.__dict__["_call_impl"] = call


def unshadow_call(module: nn.Module) -> None:
    module.__dict__.pop("_call_impl", None)


def call_unshadowed(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """``module(...)`` as if it had not been shadowed."""
    return nn.Module._call_impl(module, *args, **kwargs)


# --------------------------------------------------------------------------------------------------------------------
# torch: schedules of pipelines


def pipeline_order(name: str, ranks: int, stages_per_rank: int, microbatches: int) -> list[list[tuple[Any, int, int]]]:
    """For each rank, the kind (F, B, I, W), stage and micro-batch of its actions, by torch's generator of ``name``.

    The generators are constructors of classes that also run a schedule. They ask their stages for a few numbers only;
    what prepares the running, ``_prepare_schedule_with_comms``, is left out.
    """
    from types import SimpleNamespace

    from torch.distributed.pipelining import schedules

    generators: dict[str, Any] = {
        "interleaved": schedules.ScheduleInterleaved1F1B,
        "zb1p": schedules.ScheduleInterleavedZeroBubble,
        "zbv": schedules.ScheduleZBVZeroBubble,
    }
    kinds = {
        schedules._ComputationType.FORWARD: "F",
        schedules._ComputationType.FULL_BACKWARD: "B",
        schedules._ComputationType.BACKWARD_INPUT: "I",
        schedules._ComputationType.BACKWARD_WEIGHT: "W",
    }
    stage = SimpleNamespace(
        stage_index=0, num_stages=ranks * stages_per_rank, group_size=ranks, group_rank=0, submod=nn.Identity()
    )

    def no_preparation(self: Any, actions: Any) -> None:
        pass

    generator = type("Order", (generators[name],), {"_prepare_schedule_with_comms": no_preparation})
    orders = generator([stage] * stages_per_rank, microbatches, loss_fn=no_preparation).pipeline_order
    return [
        [(kinds[a.computation_type], a.stage_index, a.microbatch_index) for a in orders[rank] if a is not None]
        for rank in range(ranks)
    ]


# --------------------------------------------------------------------------------------------------------------------
# torch: DistributedDataParallel


def ddp_prepare_for_backward(ddp: nn.Module, output: Any) -> None:
    """Arm DDP's reducer for a backward that starts inside the forward (manual optimization), as Lightning does."""
    from lightning.pytorch.overrides.distributed import prepare_for_backward

    prepare_for_backward(ddp, output)  # type: ignore[arg-type]


# --------------------------------------------------------------------------------------------------------------------
# Lightning


def init_process_group(environment: ClusterEnvironment, backend: str, timeout: timedelta, device_id: Any) -> None:
    """Lightning's way to start the default group; returns at once where one exists."""
    from lightning.fabric.utilities.distributed import _init_dist_connection

    _init_dist_connection(environment, backend, timeout=timeout, device_id=device_id)


def default_backend(device: torch.device) -> str:
    """``nccl`` for CUDA, ``gloo`` for CPU."""
    from lightning.fabric.utilities.distributed import _get_default_process_group_backend_for_device

    return _get_default_process_group_backend_for_device(device)


def reset_seed() -> None:
    """Repeat ``seed_everything`` in a process that Lightning launched."""
    from lightning.fabric.utilities.seed import reset_seed as lightning_reset_seed

    lightning_reset_seed()


def is_seeded() -> bool:
    """Whether this process was seeded as ``seed_everything`` asked for; a spawned process was not."""
    import os

    return os.environ.get("PL_GLOBAL_SEED") in (None, str(torch.initial_seed()))


def set_rank_zero(rank: int) -> None:
    """Tell Lightning's two ``rank_zero_only`` decorators which rank this process has."""
    from lightning.fabric.utilities.rank_zero import rank_zero_only as fabric_rank_zero_only
    from lightning_utilities.core.rank_zero import rank_zero_only as utilities_rank_zero_only

    fabric_rank_zero_only.rank = utilities_rank_zero_only.rank = rank  # type: ignore[attr-defined]


def sync_reduce(tensor: Tensor, group: Any, reduce_op: Any) -> Tensor:
    """Lightning's all-reduce for logged values (mean, sum, min, max ...)."""
    from lightning.fabric.utilities.distributed import _sync_ddp_if_available

    return _sync_ddp_if_available(tensor, group, reduce_op=reduce_op)


def all_gather_batch(tensor: Tensor, group: Any, sync_grads: bool) -> Tensor:
    """Lightning's ``self.all_gather``: ``[group size, *tensor.shape]``."""
    from lightning.fabric.utilities.distributed import _all_gather_ddp_if_available

    return _all_gather_ddp_if_available(tensor, group=group, sync_grads=sync_grads)


def popen_launcher(environment: ClusterEnvironment, processes: int, nodes: int) -> _Launcher:
    """The launcher that starts the script again for each local rank."""
    from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher

    return _SubprocessScriptLauncher(environment, processes, nodes)


def is_interactive() -> bool:
    """Whether this is a notebook or a Python prompt."""
    from lightning.fabric.utilities.imports import _IS_INTERACTIVE

    return _IS_INTERACTIVE


def optimizers_to_device(optimizers: Iterable[Any], device: torch.device) -> None:
    """Move optimizer states that were made on another device."""
    from lightning.fabric.utilities.optimizer import _optimizers_to_device

    _optimizers_to_device(optimizers, device)


def unwrap_lightning_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """The torch optimizer inside Lightning's wrapper."""
    return getattr(optimizer, "_optimizer", optimizer)


def metrics_in_group(module: nn.Module, group: Any) -> None:
    """Let torchmetrics' metrics add up over ``group`` only, where the user has not chosen otherwise.

    Their own ``process_group`` would do, but it cannot be copied with the module, as moving averages do.
    """
    for metric in module.modules():
        if hasattr(metric, "dist_sync_fn") and metric.dist_sync_fn is None and metric.process_group is None:
            metric.dist_sync_fn = _GatherInGroup(group)


def metrics_everywhere(module: nn.Module) -> None:
    """Undo :func:`metrics_in_group`."""
    for metric in module.modules():
        if isinstance(getattr(metric, "dist_sync_fn", None), _GatherInGroup):
            metric.dist_sync_fn = None  # type: ignore[assignment]


class _GatherInGroup:
    def __init__(self, group: Any) -> None:
        self._group = group

    def __deepcopy__(self, memo: Any) -> _GatherInGroup:
        return self

    def __call__(self, value: Tensor, group: Any = None) -> list[Tensor]:
        from torchmetrics.utilities.distributed import gather_all_tensors

        return gather_all_tensors(value, self._group)


def synced_log_keys(trainer: pl.Trainer) -> list[str]:
    """Names of the plain values that the running loop is to reduce over the ranks (``sync_dist``), in that order.

    Values with ``rank_zero_only`` are logged by one rank and reduced by none.
    """
    results: dict[str, Any] = trainer._results or {}
    tensors = {key: result.meta.sync for key, result in results.items() if result.is_tensor}
    return [key for key, sync in tensors.items() if sync.should and not sync.rank_zero_only]


def allow_compiled_modules(strategy_type: type) -> None:
    """Let ``trainer.fit(torch.compile(module))`` through for a strategy of our own.

    Lightning asks ``_verify_strategy_supports_compile``, which knows three of its own classes by name; the function is
    wrapped where the Trainer looks it up, and every other strategy is still judged by Lightning.
    """
    from lightning.pytorch.trainer import trainer as trainer_module

    original = trainer_module._verify_strategy_supports_compile

    def verify(model: Any, strategy: Any) -> None:
        if not isinstance(strategy, strategy_type):
            original(model, strategy)

    trainer_module._verify_strategy_supports_compile = verify


def compiled_forward(module: nn.Module) -> Any:
    """What ``module.forward = torch.compile(module.forward)`` compiles; ``None`` where nothing."""
    return getattr(vars(module).get("forward"), "_torchdynamo_orig_callable", None)


def is_compiled(module: nn.Module) -> bool:
    """Whether ``module`` itself goes through ``torch.compile``: wrapped, in place, its ``forward``, or by Lightning."""
    return (
        type(module).__name__ == "OptimizedModule"
        or getattr(module, "_compiled_call_impl", None) is not None
        or compiled_forward(module) is not None
        or getattr(module, "_compiler_ctx", None) is not None
    )


def registered_signal_handler(signum: int) -> list[Any] | None:
    """What Lightning registered for a signal (``_HandlersCompose``); ``None`` if the handler is somebody else's."""
    import signal

    from lightning.pytorch.trainer.connectors.signal_connector import _HandlersCompose

    handler = signal.getsignal(signum)
    return list(handler.signal_handlers) if isinstance(handler, _HandlersCompose) else None


def is_sigterm_notifier(handler: Any) -> bool:
    """Whether this is Lightning's SIGTERM handler, which broadcasts from inside the handler."""
    from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector

    return getattr(handler, "__func__", None) is _SignalConnector._sigterm_notifier_fn


def mark_sigterm(trainer: pl.Trainer) -> bool:
    """Set the flag that the training loop looks at; returns whether it was not set before."""
    connector = trainer._signal_connector
    first_time = not connector.received_sigterm
    connector.received_sigterm = True
    return first_time


def slurm_requeue_signal(trainer: pl.Trainer) -> int | None:
    """The signal by which SLURM announces a requeue; ``None`` outside SLURM or without auto-requeue."""
    from lightning.fabric.plugins.environments import SLURMEnvironment

    environment = trainer._accelerator_connector.cluster_environment
    if isinstance(environment, SLURMEnvironment) and environment.auto_requeue:
        return environment.requeue_signal
    return None


def hold_back_schedulers(trainer: pl.Trainer, is_held: Callable[[], bool]) -> Callable[[], None]:
    """Let step-interval schedulers stand still while ``is_held()``; returns a function that undoes it.

    Lightning moves them at the end of each window (``_TrainingEpochLoop.update_lr_schedulers``) whether or not the
    optimizer took its step. The method is shadowed on the loop of this trainer alone.
    """
    loop = trainer.fit_loop.epoch_loop
    original = loop.update_lr_schedulers

    def update_lr_schedulers(interval: str, update_plateau_schedulers: bool) -> None:
        if interval != "step" or not is_held():
            original(interval, update_plateau_schedulers=update_plateau_schedulers)

    loop.update_lr_schedulers = update_lr_schedulers  # type: ignore[method-assign]
    return lambda: loop.__dict__.pop("update_lr_schedulers", None)


def precision_flag(trainer: pl.Trainer) -> str:
    """The value of ``Trainer(precision=...)``; ``"32-true"`` where it was not given."""
    return trainer._accelerator_connector._precision_flag
