"""What torch functions do with sharded parameters and gradients in a module's own code, between the steps' forwards.

A hook resets a row, draws new weights, keeps a moving average, exchanges ``parameter.data``. DTensor refuses a part of
this, and answers another part wrongly, without a word: a write into ``weight[0]`` changes a copy of the row,
``normal_`` draws the same numbers on every rank, ``parameter.data = value`` does nothing. Here such functions run on
the whole tensor, of which each rank keeps its part. Like every use of a sharded value that is something that all ranks
must do. What autograd records, and its backward, are left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_effi.compat import dtensor as dtensor_compat
from lightning_effi.compat import torch as torch_compat
from lightning_effi.sharded_tensors.names import is_in_place

# Whatever their arguments are, what they return may share memory with the first one.
_VIEWS = {
    *("__getitem__", "select", "narrow", "chunk", "split", "tensor_split", "unbind", "view", "view_as", "reshape"),
    *("flatten", "unflatten", "squeeze", "unsqueeze", "t", "transpose", "swapaxes", "permute", "movedim", "diagonal"),
    *("expand", "expand_as", "unfold", "detach", "ravel", "reshape_as"),
}
_DRAWS_LIKE = {"rand_like", "randn_like", "randint_like"}
_DRAWS = {*_DRAWS_LIKE, "bernoulli", "poisson", "multinomial", "normal", "dropout"}
_DRAWS_IN_PLACE = {
    *("normal_", "uniform_", "bernoulli_", "random_", "exponential_", "geometric_", "cauchy_", "log_normal_"),
}
_steps_under_way = 0
# They compute nothing from the values of their arguments, and must not run a second time.
_NO_VALUES = {"backward", "__deepcopy__", "__reduce_ex__", "__setstate__", "requires_grad_", "retain_grad", "__hash__"}
_LINEAGE = "_lightning_effi_lineage"
_GRADIENT_HOOKS = "_lightning_effi_gradient_hooks"
_REBOUND = "_lightning_effi_rebound"


def run(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """``func(*args, **kwargs)``, in which some arguments are DTensors."""
    owner, name = getattr(func, "__self__", None), getattr(func, "__name__", "")
    if torch_compat.in_backward() or torch.compiler.is_compiling() or name in _NO_VALUES or name.startswith("_fused"):
        return func(*args, **kwargs)
    if owner is Tensor.data:
        return _set_data(*args) if name == "__set__" else _view(func, args, kwargs)
    if func is Tensor.register_hook and args[0].is_leaf:
        return _register_hook(func, *args)
    if getattr(func, "__module__", None) == "torch.nn.init":  # they take their tensor by position or by name
        tensor, *rest = args or (kwargs.pop("tensor"),)
        with torch.no_grad():
            return _write(func, tensor, rest, kwargs)
    if name in _DRAWS_LIKE:
        return _draw_like(func, args, kwargs)
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return _recorded(func, args, kwargs, tensors)
    if name in _DRAWS:
        return _distributed(func(*_whole(args), **_whole(kwargs)), args[0])
    if name in _VIEWS:
        return _view(func, args, kwargs)
    if name == "__iter__":
        return iter(_view(Tensor.unbind, args, {}))
    meet = _meet(tensors)
    if isinstance(kwargs.get("out"), Tensor):
        return _write_out(func, args, kwargs)
    if name.startswith("_foreach_"):
        return _each(func, args, kwargs) if meet else func(*args, **kwargs)
    if is_in_place(name):
        return _change(func, args, kwargs, meet or name == "__setitem__" or name in _DRAWS_IN_PLACE)
    if meet or name.endswith("_loss"):  # DTensor takes the mean of the ranks' means, although parts are of unequal size
        return func(*_whole(args), **_whole(kwargs))
    return _or_whole(partial(func, *args, **kwargs), lambda: func(*_whole(args), **_whole(kwargs)))


@contextmanager
def in_step() -> Iterator[None]:
    """Inside, a sharded parameter that autograd records is not read whole here, since its gradient is an average."""
    global _steps_under_way
    _steps_under_way += 1
    try:
        yield
    finally:
        _steps_under_way -= 1


# -- reading ---------------------------------------------------------------------------------------------------------


def _or_whole(directly: Callable[[], Any], on_wholes: Callable[[], Any]) -> Any:
    """What DTensor has no rule for (it says so before it does anything) is done with whole tensors.

    Errors of the caller's making come again, from plain tensors.
    """
    try:
        return directly()
    except (dist.DistError, torch.OutOfMemoryError):  # this rank's alone: the others would wait for the whole
        raise
    except (NotImplementedError, RuntimeError):
        return on_wholes()


def _recorded(func: Callable[..., Any], args: Any, kwargs: Any, tensors: Sequence[Tensor]) -> Any:
    """A function of which autograd keeps a record, in a hook or, for weights split by tensor parallelism, in a step."""
    meshes = [tensor.device_mesh for tensor in tensors if hasattr(tensor, "device_mesh")]
    name = getattr(func, "__name__", "")
    if (_steps_under_way and any(mesh.mesh_dim_names != ("tp",) for mesh in meshes)) or is_in_place(name):
        return func(*args, **kwargs)

    def on_wholes() -> Any:
        return func(*_complete(args), **_complete(kwargs))

    return on_wholes() if _meet(tensors) else _or_whole(partial(func, *args, **kwargs), on_wholes)


def _complete(value: Any) -> Any:
    """Whole tensors, whose gradients are complete on every rank."""
    from torch.distributed.tensor import DTensor, Replicate

    def complete(tensor: Any) -> Tensor:
        return tensor.full_tensor(grad_placements=[Replicate()] * tensor.device_mesh.ndim)  # type: ignore[no-any-return]

    return tree_map_only(DTensor, complete, value)


def _meet(tensors: Sequence[Tensor]) -> bool:
    """Whether these tensors are of several meshes, or some sharded and some plain; plain scalars go with all."""
    return len({getattr(t, "device_mesh", None) for t in tensors if t.dim() or hasattr(t, "device_mesh")}) > 1


def _whole(value: Any) -> Any:
    from torch.distributed.tensor import DTensor

    return tree_map_only(DTensor, lambda tensor: tensor.full_tensor(), value)


def _view(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """A view, of which is remembered what it is a view of wherever its memory is not that of the base."""
    from torch.distributed.tensor import DTensor, Replicate

    base = args[0]
    if not isinstance(base, DTensor):
        return func(*_whole(args), **_whole(kwargs))

    def on_whole() -> Any:
        result = func(base.full_tensor(), *_whole(args[1:]), **_whole(kwargs))
        everywhere = [Replicate()] * base.device_mesh.ndim
        return tree_map_only(
            Tensor, lambda tensor: DTensor.from_local(tensor, base.device_mesh, everywhere, run_check=False), result
        )

    result = _or_whole(partial(func, *args, **kwargs), on_whole)
    again: Callable[[Tensor], Any] = partial(_call_on, func, _whole(args[1:]), _whole(kwargs))
    if isinstance(result, DTensor):
        _remember(result, base, again)
    elif isinstance(result, (tuple, list)):
        for index, item in enumerate(result):
            _remember(item, base, partial(_item, again, index))
    return result


def _call_on(func: Callable[..., Any], args: Any, kwargs: Any, tensor: Tensor) -> Any:
    return func(tensor, *args, **kwargs)


def _item(view: Callable[[Tensor], Any], index: int, tensor: Tensor) -> Any:
    return view(tensor)[index]


def _remember(view: Any, base: Any, how: Callable[[Tensor], Any]) -> None:
    lineage = getattr(base, _LINEAGE, None)
    if lineage is not None:
        origin, first = lineage
        setattr(view, _LINEAGE, (origin, lambda tensor: how(first(tensor))))
    elif view is not base and _shards(view) != _shards(base):  # gathered, so another memory
        setattr(view, _LINEAGE, (base, how))


def _shards(tensor: Any) -> int:
    return sum(dtensor_compat.is_sharded(placement) for placement in tensor.placements)


# -- writing ---------------------------------------------------------------------------------------------------------


def _change(func: Callable[..., Any], args: Any, kwargs: Any, on_whole: bool) -> Any:
    """An in-place function."""
    from torch.distributed.tensor import DTensor

    target, rest = args[0], args[1:]
    if not isinstance(target, DTensor):
        return func(target, *_whole(rest), **_whole(kwargs))
    if on_whole or hasattr(target, _LINEAGE):
        return _write(func, target, rest, kwargs)
    return _or_whole(partial(func, *args, **kwargs), lambda: _write(func, target, rest, kwargs))


def _write(func: Callable[..., Any], target: Any, args: Any, kwargs: Any) -> Any:
    """Run an in-place function on the whole of ``target``'s base, and keep this rank's part of the result."""
    base, view = getattr(target, _LINEAGE, (target, lambda tensor: tensor))
    full = base.detach().full_tensor().clone()
    changed = view(full)
    func(changed, *_whole(args), **_whole(kwargs))
    _replace(base, full)
    if target is not base:
        _replace(target, changed)
    return target


def _write_out(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """A function with ``out=``."""
    out, others = kwargs["out"], {key: value for key, value in kwargs.items() if key != "out"}
    return _write(lambda whole: func(*_whole(args), **_whole(others), out=whole), out, (), {})


def _replace(tensor: Any, full: Tensor) -> None:
    with torch.no_grad():
        dtensor_compat.local_tensor(tensor).copy_(_part(_agreed(full, tensor), tensor))


def _agreed(full: Tensor, like: Any) -> Tensor:
    """Where ranks hold copies, the copies must not part: what the first of them drew counts."""
    for dim, placement in enumerate(like.placements):
        group = like.device_mesh.get_group(dim)
        if not dtensor_compat.is_sharded(placement) and dist.get_world_size(group) > 1:
            dist.broadcast(full, dist.get_global_rank(group, 0), group)
    return full


def _part(full: Tensor, like: Any) -> Tensor:
    """This rank's part of ``full``, which is to be laid out as ``like`` is."""
    coordinate = like.device_mesh.get_coordinate()
    axes = [axis for axis, placement in enumerate(like.placements) if dtensor_compat.is_sharded(placement)]
    for axis in sorted(axes, key=lambda axis: not like.placements[axis].is_shard()):  # strided ones cut what is left
        dim, count = like.placements[axis].dim, like.device_mesh.size(axis)
        size = -(-full.shape[dim] // count)
        start = min(coordinate[axis] * size, full.shape[dim])
        full = full.narrow(dim, start, min(size, full.shape[dim] - start))
    return full


def _distributed(full: Any, like: Any) -> Any:
    from torch.distributed.tensor import DTensor

    if not isinstance(like, DTensor) or not isinstance(full, Tensor) or full.shape != like.shape:
        return full
    return dtensor_compat.wrap_local(_part(_agreed(full, like), like).contiguous(), like)


def _draw_like(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    like = args[0]
    return _distributed(func(torch.empty(like.shape, dtype=like.dtype, device=like.device), *args[1:], **kwargs), like)


def _set_data(tensor: Any, value: Tensor) -> None:
    """``tensor.data = value``: other memory, as for plain tensors, so that what was kept of the old is not changed."""
    from torch.distributed.tensor import DTensor

    if not isinstance(tensor, DTensor):
        tensor.data = _whole(value)
        return
    if value.shape != tensor.shape or value.dtype != tensor.dtype:
        raise ValueError(
            f"a sharded parameter cannot become another shape or dtype: {tuple(tensor.shape)} of {tensor.dtype} was"
            f" given data of shape {tuple(value.shape)} and {value.dtype}"
        )
    if isinstance(value, DTensor) and (value.device_mesh, value.placements) == (tensor.device_mesh, tensor.placements):
        local = dtensor_compat.local_tensor(value)
    else:
        local = _part(_agreed(_whole(value.detach()), tensor), tensor).contiguous()
    dtensor_compat.rebind_local(tensor, local)
    setattr(tensor, _REBOUND, True)


def was_rebound(tensor: Tensor) -> bool:
    """Whether ``tensor.data`` was set since this was last asked."""
    return tensor.__dict__.pop(_REBOUND, False)


def _each(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """A function of lists, for each tensor of the first list alone."""
    count, results = len(args[0]), []
    for index in range(count):
        alone = [[a[index]] if isinstance(a, (list, tuple)) and len(a) == count else a for a in args]
        tensors = [leaf for leaf in tree_leaves((alone, kwargs)) if isinstance(leaf, Tensor)]
        if not _meet(tensors):
            results.append(func(*alone, **kwargs))
        elif func.__name__.endswith("_"):
            results.append(_change_one(func, alone, kwargs))
        else:
            results.append(func(*_whole(alone), **_whole(kwargs)))
    return None if func.__name__.endswith("_") else [result for [result] in results]


def _change_one(func: Callable[..., Any], alone: Any, kwargs: Any) -> Any:
    [target], *rest = alone
    return _change(lambda tensor, *others, **named: func([tensor], *others, **named), (target, *rest), kwargs, True)


# -- hooks on gradients ----------------------------------------------------------------------------------------------


def keep_gradient_hooks(parameter: Tensor, hooks: dict[int, Callable[[Tensor], Tensor | None]]) -> None:
    """Let ``parameter.register_hook`` add to ``hooks``, which whoever makes its gradient has to call."""
    setattr(parameter, _GRADIENT_HOOKS, hooks)


def gradient_hooks(parameter: Tensor) -> dict[int, Callable[[Tensor], Tensor | None]]:
    """The hooks that were registered on the gradient of a sharded parameter."""
    return getattr(parameter, _GRADIENT_HOOKS, {})


def _register_hook(func: Callable[..., Any], parameter: Tensor, hook: Callable[[Tensor], Tensor | None]) -> Any:
    from torch.utils.hooks import RemovableHandle

    if not hasattr(parameter, "device_mesh"):
        return func(parameter, hook)
    if not hasattr(parameter, _GRADIENT_HOOKS):
        raise ValueError(
            "a hook was registered on the gradient of a parameter that tensor parallelism splits, where it would see"
            " one rank's part. Change the gradient in on_after_backward or on_before_optimizer_step, or keep the layer"
            " whole by TensorParallel(plan={'<name of the layer>': 'replicate'})"
        )
    hooks = gradient_hooks(parameter)
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle
