"""Private names of torch outside FSDP2 and DTensor, each behind a function of our own."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def mesh_apart(device_type: str, sizes: tuple[int, ...], names: tuple[str, ...], timeout: timedelta) -> DeviceMesh:
    """``init_device_mesh`` with groups of gloo that are never the default group, also along an axis of all ranks.

    Meshes take the default group there unless they are told a backend (``backend_override``).
    """
    from torch.distributed.device_mesh import init_device_mesh

    override: Any = dict.fromkeys(names, "gloo")
    mesh = init_device_mesh(device_type, sizes, mesh_dim_names=names, backend_override=override)
    for group in mesh.get_all_groups():
        _set_timeout(timeout, group)
    return mesh


def flatten_mesh(mesh: DeviceMesh, name: str, timeout: timedelta | None = None) -> DeviceMesh:
    """One axis named ``name`` over all ranks of ``mesh`` (``DeviceMesh._flatten``, torch 2.13-2.14).

    Args:
        mesh: several axes.
        name: of the one.
        timeout: of a group of gloo that is never the default group; ``None`` leaves the choice to the mesh.
    """
    if timeout is None:
        return mesh._flatten(name)
    flat = mesh._flatten(name, backend_override="gloo")
    _set_timeout(timeout, flat.get_group())
    return flat


def _set_timeout(timeout: timedelta, group: Any) -> None:
    """``dist.set_timeout``, which was ``_set_pg_timeout`` before torch 2.14; meshes have none to give."""
    import torch.distributed as dist

    set_timeout: Any = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout  # type: ignore[attr-defined]
    set_timeout(timeout, group)


_process = os.getpid()  # for which the pool of operators' threads was made


def rebuild_thread_pool() -> None:
    """In a process that was forked, let this thread make a new pool for operators; nothing in other processes.

    A fork takes no threads along, so torch gives the pool up in the child, and the next caller of
    ``at::set_num_threads`` makes another (``pthreadpool()``). Each new thread is such a caller in its first operator,
    with the number of threads that was set before the fork, and nothing keeps two of them apart: the threads that
    autograd starts together found no pool at all, about once in ten forks ("Invalid thread pool!", torch 2.13-2.14).
    """
    global _process
    if _process != os.getpid():
        torch.set_num_threads(torch.get_num_threads())
        _process = os.getpid()


def start_autograd() -> None:
    """Let autograd start its threads for the devices that there are, before anything looks like a further one.

    It does so once, in the first backward. FakeTensorMode, which DTensor's operators use inside, registers a device of
    8 units in torch 2.14; with threads for them, a process cannot fork ranks or data loaders that run a backward.
    """
    torch.ones((), requires_grad=True).backward()


def group_named(name: str) -> Any:
    """The process group with that ``group_name``, as long as it has not been destroyed (``_resolve_process_group``)."""
    from torch.distributed.distributed_c10d import _resolve_process_group

    return _resolve_process_group(name)  # type: ignore[arg-type]


def hold_groups(mesh: DeviceMesh, hold: bool) -> None:
    """Let a mesh hold its process groups, or only their names (``DeviceMesh._pg_registry``).

    It looks groups up by name; those that it holds as well are for ``torch.compile``, which traces through meshes.
    """
    mesh._pg_registry.clear()
    if hold:
        mesh._pg_registry.update({name: group_named(name) for name in mesh._dim_group_names})


def default_store(prefix: str, timeout: float) -> Any:
    """A connection of its own to the key-value store behind the default process group (``_get_default_store``)."""
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _get_default_store

    store = dist.PrefixStore(prefix, _get_default_store().clone())
    store.set_timeout(timedelta(seconds=timeout))
    return store


def message_counts() -> dict[str, int]:
    """How many messages this process has sent through each of its process groups, by the group's name.

    Names and counts (``_get_sequence_number_for_group``) are the same on all members that have done the same.
    """
    from torch.distributed.distributed_c10d import _world

    groups: dict[Any, str] = dict(_world.pg_names)
    return {name: group._get_sequence_number_for_group() for group, name in groups.items()}


class Message(NamedTuple):
    """A collective that this process has entered.

    Attributes:
        group: name of its process group.
        number: the how-manieth it is of that group.
        operation: as ``all_reduce``.
        size: elements that this process puts in.
        is_open: whether it is not complete.
        place: where it was entered, which whoever asks fills in.
    """

    group: str
    number: int
    operation: str
    size: int
    is_open: bool
    place: str = ""


Frame = tuple[str, int, str]  # file, line, function


def records_messages() -> bool:
    """Whether the flight recorder of collectives is on, as it is unless ``TORCH_FR_BUFFER_SIZE=0``."""
    import os

    names = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
    return all(os.environ.get(name) != "0" for name in names)


def recorded_messages(since: int, *, places: bool = True) -> tuple[list[tuple[Message, list[Frame]]], bool]:
    """The latest collectives over gloo, of those since ``time.time_ns() == since``; the oldest first.

    They come from the flight recorder (``_dump_fr_trace``, torch 2.13-2.14), with the stack of Python functions that
    entered them, the innermost first.

    Args:
        since: the start of a run.
        places: whether stacks are asked for, which take time.

    Returns:
        the collectives, and whether there were no earlier ones, which the recorder has forgotten.
    """
    import pickle

    from torch._C._distributed_c10d import _dump_fr_trace  # type: ignore[attr-defined]

    entries = pickle.loads(_dump_fr_trace(True, places, False)).get("entries", [])
    recorded = [
        (
            Message(
                group=entry["process_group"][0],
                number=entry["collective_seq_id"],
                operation=entry["profiling_name"].partition(":")[2].strip("_"),
                size=sum(torch.Size(shape).numel() for shape in entry["input_sizes"]),
                is_open=not entry["retired"],
            ),
            [(frame["filename"], frame["line"], frame["name"]) for frame in entry.get("frames", ())],
        )
        for entry in entries
        if not entry["is_p2p"] and entry["time_created_ns"] >= since
    ]
    return recorded, not entries or entries[0]["record_id"] == 0 or entries[0]["time_created_ns"] < since


def group_members() -> dict[str, list[int]]:
    """The ranks of each process group that this process belongs to, by its name (``_world.pg_group_ranks``)."""
    from torch.distributed.distributed_c10d import _world

    return {name: sorted(_world.pg_group_ranks[group]) for group, name in dict(_world.pg_names).items()}


def store_port() -> int | None:
    """The port of the key-value store behind the default process group; ``None`` for a store in a file."""
    from torch.distributed.distributed_c10d import _get_default_store

    store: Any = _get_default_store()
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return getattr(store, "port", None)


def broadcast_module_states(tensors: list[Tensor], group: Any, src: int = 0) -> None:
    """Send rank ``src``'s values of ``tensors`` to all ranks of ``group``, in buckets of 250 MB.

    ``dist._broadcast_coalesced`` is what DistributedDataParallel uses to make replicas equal; ``src`` is the rank
    inside the group.
    """
    import torch.distributed as dist

    dist._broadcast_coalesced(group, tensors, 250 * 1024 * 1024, src)


# Inside this context, tensor subclasses are treated as plain tensors by torch functions.
without_subclass_dispatch = torch._C.DisableTorchFunctionSubclass


def has_functions_of_its_own(kind: type) -> bool:
    """Whether a class of tensors has a ``__torch_function__`` other than that of plain tensors and parameters."""
    ours: Any = kind.__torch_function__  # type: ignore[attr-defined]
    stock: Any = Tensor.__torch_function__
    return ours is not torch._C._disabled_torch_function_impl and getattr(ours, "__func__", None) is not stock.__func__


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


def unscale_and_check(gradients: list[Tensor], overflow: Tensor, inverse: Tensor) -> None:
    """Multiply tensors of one device and dtype with ``inverse`` and set ``overflow`` to 1 where they are not finite.

    The kernel of ``torch.amp.GradScaler``, which reads each gradient once (two 0-dim fp32 tensors on that device).
    """
    torch._amp_foreach_non_finite_check_and_unscale_(gradients, overflow, inverse)


def in_backward() -> bool:
    """Whether autograd is running a backward in this thread (``torch._C._current_graph_task_id``)."""
    return torch._C._current_graph_task_id() != -1


def backward_in_modes(loss: Tensor) -> None:
    """``loss.backward()`` such that recomputation within it is seen by the function modes that are active now.

    ``loss.backward()`` is itself seen by them, and a mode is off while it handles a function (torch 2.12-2.14).
    """
    from torch.autograd.graph import _engine_run_backward

    _engine_run_backward(
        (loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True, accumulate_grad=True
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


def fake_tensor_mode() -> Any:
    """Tensors with shapes and dtypes but no values (``torch._subclasses.FakeTensorMode``)."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def fake_mode_of(value: Any) -> Any:
    """The mode in which a tensor without values was made; ``None`` for all else."""
    from torch._subclasses.fake_tensor import FakeTensor

    return value.fake_mode if isinstance(value, FakeTensor) else None


def shadow_call(module: nn.Module, call: Callable[..., Any]) -> None:
    """Let ``module(...)`` be ``call(...)``, hooks included."""
    module.__dict__["_call_impl"] = call


def unshadow_call(module: nn.Module) -> None:
    module.__dict__.pop("_call_impl", None)


def call_unshadowed(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """``module(...)`` as if it had not been shadowed."""
    return nn.Module._call_impl(module, *args, **kwargs)


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


def ddp_prepare_for_backward(ddp: nn.Module, output: Any) -> None:
    """Arm DDP's reducer for a backward that starts inside the forward (manual optimization), as Lightning does."""
    from lightning.pytorch.overrides.distributed import prepare_for_backward

    prepare_for_backward(ddp, output)  # type: ignore[arg-type]


@contextmanager
def reentrant_checkpoints(note: Callable[[], None]) -> Iterator[None]:
    """Inside, call ``note`` for each ``checkpoint(..., use_reentrant=True)``, whose backward runs one of its own."""
    from torch.utils.checkpoint import CheckpointFunction

    original = vars(CheckpointFunction)["forward"]

    def forward(ctx: Any, *args: Any) -> Any:
        note()
        return original.__func__(ctx, *args)

    CheckpointFunction.forward = staticmethod(forward)  # type: ignore[method-assign]
    try:
        yield
    finally:
        CheckpointFunction.forward = original  # type: ignore[method-assign]


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


def output_size(node: Any, index: int) -> int:
    """Number of elements of the ``index``-th tensor that a node of the autograd graph gave in forward.

    ``Node._input_metadata`` (the inputs of backward are the outputs of forward, torch 2.13-2.14); 1 for nodes without.
    """
    metadata = node._input_metadata
    return int(torch.Size(metadata[index].shape).numel()) if index < len(metadata) else 1


def saved(node: Any, name: str) -> Any:
    """What a node of the autograd graph keeps for its backward under ``name`` (``Node._saved_*``), or ``None``."""
    return getattr(node, f"_saved_{name}", None)


def autocast_dtype() -> torch.dtype | None:
    """What autocast, where it is on, computes with."""
    for device in ("cpu", "cuda"):
        if torch.is_autocast_enabled(device):
            return torch.get_autocast_dtype(device)
    return None


@contextmanager
def function_mode_left(mode: Any) -> Iterator[None]:
    """Inside, ``mode`` sees nothing if it is the innermost function mode, and costs nothing."""
    from torch import overrides

    if overrides._get_current_function_mode() is not mode:
        yield
        return
    with overrides._pop_mode_temporarily():
        yield


@contextmanager
def default_group(group: Any) -> Iterator[None]:
    """Inside, ``group`` is what torch's collectives take where none is named (``GroupMember.WORLD``).

    Sources and destinations of such collectives are places in ``group``. ``get_rank`` of a named group would look up
    the place in ``group`` among that group's global ranks, so it is asked of the named group itself, and meshes go on
    counting processes (torch 2.13-2.14).
    """
    import torch.distributed as dist
    from torch.distributed import device_mesh, distributed_c10d

    before, get_rank, process = dist.GroupMember.WORLD, dist.get_rank, device_mesh.get_rank()

    def rank_in(group: Any = None) -> int:
        named = isinstance(group, dist.ProcessGroup) and group is not dist.GroupMember.WORLD
        return group.rank() if named else get_rank(group)

    def rank_in_mesh(group: Any = None) -> int:
        return process if group is None else rank_in(group)

    places = (dist, rank_in), (distributed_c10d, rank_in), (device_mesh, rank_in_mesh)
    originals = [module.get_rank for module, _ in places]
    dist.GroupMember.WORLD = group
    for module, replacement in places:
        module.get_rank = replacement  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for (module, _), original in zip(places, originals, strict=True):
            module.get_rank = original  # type: ignore[attr-defined]
        dist.GroupMember.WORLD = before


def layer_being_parametrized(frame: FrameType | None) -> nn.Module | None:
    """The module that a running ``register_parametrization`` was given; ``None`` where none runs in ``frame``'s stack.

    torch takes the parameter off before it tells the module of its parametrization.
    """
    code = parametrize.register_parametrization.__code__
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return None if frame is None else cast("nn.Module", frame.f_locals["module"])
