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
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from lightning_effi.compat import dtensor as dtensor_compat
from lightning_effi.compat import torch as torch_compat
from lightning_effi.sharded_tensors.names import (
    DRAWS,
    DRAWS_IN_PLACE,
    DRAWS_LIKE,
    NO_VALUES,
    READS,
    VIEWS,
    is_in_place,
    needs_whole,
    sensitivity,
    writes,
)
from lightning_effi.sharded_tensors.wholes import (
    complete,
    distributed,
    is_sharded_tensor,
    is_uneven,
    leaves_ranks_empty,
    replace,
    replicated,
    settle,
    settled,
    whole,
)

_LINEAGE = "_lightning_effi_lineage"
_GRADIENT_HOOKS = "_lightning_effi_gradient_hooks"
_REBOUND = "_lightning_effi_rebound"
_steps_under_way = 0


def run(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """``func(*args, **kwargs)``, in which some arguments are DTensors."""
    owner, name = getattr(func, "__self__", None), getattr(func, "__name__", "")
    if torch.compiler.is_compiling() or name in NO_VALUES or name.startswith("_fused") or _is_collective(func):
        return func(*args, **kwargs)
    if name in READS:
        return func(*whole(args), **whole(kwargs))
    if torch_compat.in_backward():
        return func(*args, **kwargs)
    if owner is Tensor.grad and name == "__get__":
        return settled(func(*args))
    if name == "__set__":
        return _SETTERS.get(owner, _set)(func, *args)
    if func is Tensor.register_hook and args[0].is_leaf:
        return _register_hook(func, *args)
    args, kwargs = _first_by_position(args, kwargs)
    if getattr(func, "__module__", None) == "torch.nn.init":
        with torch.no_grad():
            return _write(func, args[0], args[1:], kwargs)
    tensors = _tensors((args, kwargs))
    _bring_up_to_date(tensors)
    if owner is Tensor.data:
        return _view(func, args, kwargs)
    if name in DRAWS_LIKE:
        return _draw_like(func, args, kwargs)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return _recorded(func, args, kwargs, tensors)
    return settled(_computed(func, args, kwargs, tensors))


def _is_collective(func: Callable[..., Any]) -> bool:
    """Whether this is a function of ``torch.distributed``, whose operators are served one by one."""
    return (getattr(func, "__module__", None) or "").startswith("torch.distributed")


def _computed(func: Callable[..., Any], args: Any, kwargs: Any, tensors: Sequence[Tensor]) -> Any:
    """A function of which autograd keeps no record."""
    name, meet = getattr(func, "__name__", ""), _meet(tensors)
    if kwargs.get("out") is not None:
        return _write_out(func, args, kwargs)
    if name.startswith("_amp_foreach_"):
        return _by_layout(func, *args)
    if name.startswith("_foreach_"):
        return _each(func, args, kwargs, meet or _parts_ways(func, tensors))
    if writes(func, args, kwargs):
        on_whole = needs_whole(func) or name == "__setitem__" or name in DRAWS or name in DRAWS_IN_PLACE
        return _change(func, args, kwargs, meet or on_whole or _parts_ways(func, tensors))
    if name in DRAWS:
        return distributed(_on_wholes(func, args, kwargs), next(filter(is_sharded_tensor, tensors)))
    if name in VIEWS:
        return _view(func, args, kwargs)
    if name == "__iter__":
        return iter(_view(Tensor.unbind, args, {}))
    if meet or needs_whole(func) or _parts_ways(func, tensors):
        return _on_wholes(func, args, kwargs)
    return _or_whole(partial(func, *args, **kwargs), partial(_on_wholes, func, args, kwargs))


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


def _first_by_position(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """``torch.flatten(input=weight)`` and the like."""
    name = next((name for name in ("input", "tensor", "self") if not args and name in kwargs), None)
    return (args, kwargs) if name is None else ((kwargs[name],), {k: v for k, v in kwargs.items() if k != name})


def _or_whole(directly: Callable[[], Any], on_wholes: Callable[[], Any]) -> Any:
    """What DTensor has no rule for (it says so before it does anything) is done with whole tensors.

    Only of functions that raise an error on all ranks or on none, see :func:`_parts_ways`. Errors of the caller's
    making come again, from plain tensors.
    """
    try:
        return directly()
    except (dist.DistError, torch.OutOfMemoryError):  # this rank's alone: the others would wait for the whole
        raise
    except (NotImplementedError, RuntimeError):
        return on_wholes()


def _on_wholes(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """The function on whole tensors. What shares memory with the whole of the first sharded one is a view of it."""
    leaves, tree = tree_flatten((args, kwargs))
    place = next((place for place, leaf in enumerate(leaves) if is_sharded_tensor(leaf)), None)
    if place is None:
        return func(*args, **kwargs)
    base, before, behind = leaves[place], whole(leaves[:place]), whole(leaves[place + 1 :])

    def again(tensor: Tensor) -> Any:
        positional, named = tree_unflatten([*before, tensor, *behind], tree)
        return func(*positional, **named)

    full = base.full_tensor()
    result = again(full)
    if type(result) in (tuple, list):
        return type(result)(_as_view(item, base, full, partial(_item, again, i)) for i, item in enumerate(result))
    return _as_view(result, base, full, again)


def _as_view(result: Any, base: Any, full: Tensor, how: Callable[[Tensor], Any]) -> Any:
    if result is full:
        return base
    if not _share_memory(result, full):
        return result
    view = replicated(result, base.device_mesh)
    _remember(view, base, how)
    return view


def _share_memory(result: Any, tensor: Tensor) -> bool:
    if not isinstance(result, Tensor) or result.layout is not torch.strided or not result.numel():
        return False
    return result.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()


def _recorded(func: Callable[..., Any], args: Any, kwargs: Any, tensors: Sequence[Tensor]) -> Any:
    """A function of which autograd keeps a record, in a hook or, for weights split by tensor parallelism, in a step."""
    meshes = [tensor.device_mesh for tensor in tensors if hasattr(tensor, "device_mesh")]
    if _steps_under_way and any(mesh.mesh_dim_names != ("tp",) for mesh in meshes):
        result = func(*args, **kwargs)  # what is logged of it is not recorded, and has to be whole
        return settled(result) if isinstance(result, Tensor) and not result.requires_grad else result
    if writes(func, args, kwargs):
        return func(*args, **kwargs)

    def on_wholes() -> Any:
        return func(*complete(args), **complete(kwargs))

    if _meet(tensors) or needs_whole(func) or _parts_ways(func, tensors):
        return on_wholes()
    return settled(_or_whole(partial(func, *args, **kwargs), on_wholes))


def _meet(tensors: Sequence[Tensor]) -> bool:
    """Whether these tensors are of several meshes, or some sharded and some plain; plain scalars go with all."""
    return len({getattr(t, "device_mesh", None) for t in tensors if t.dim() or hasattr(t, "device_mesh")}) > 1


def _parts_ways(func: Callable[..., Any], tensors: Sequence[Tensor]) -> bool:
    """Whether some ranks may raise an error here that others do not, which would then wait for them for ever.

    Answered from what all ranks know, never from what one has met: the function, and kinds and lengths of all parts.
    """
    looks = sensitivity(func)
    return (
        looks.values
        or (looks.lengths and any(map(is_uneven, tensors)))
        or (looks.nothing and any(map(leaves_ranks_empty, tensors)))
        or (looks.integers and any(is_sharded_tensor(t) and not _is_real(t) for t in tensors))
    )


def _is_real(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool


# -- views -----------------------------------------------------------------------------------------------------------


@dataclass
class _Lineage:
    """What a sharded tensor is a view of, whose memory it does not share."""

    base: Any
    view: Callable[[Tensor], Tensor]
    version: int

    def of_part(self, how: Callable[[Tensor], Any]) -> _Lineage:
        return _Lineage(self.base, lambda tensor: how(self.view(tensor)), self.version)


def _view(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """A view, of which is remembered what it is a view of wherever its memory is not that of the base."""
    base = args[0]
    if not is_sharded_tensor(base):
        return func(*whole(args), **whole(kwargs))

    def on_whole() -> Any:
        result = func(base.full_tensor(), *whole(args[1:]), **whole(kwargs))
        return tree_map_only(Tensor, lambda tensor: replicated(tensor, base.device_mesh), result)

    directly = on_whole if _parts_ways(func, _tensors((args, kwargs))) else partial(func, *args, **kwargs)
    result = settled(_or_whole(directly, on_whole))
    again: Callable[[Tensor], Any] = partial(_call_on, func, whole(args[1:]), whole(kwargs))
    if is_sharded_tensor(result):
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
        setattr(view, _LINEAGE, lineage.of_part(how))
    elif view is not base and _shards(view) != _shards(base):  # gathered, so another memory
        setattr(view, _LINEAGE, _Lineage(base, how, _version(base)))


def _shards(tensor: Any) -> int:
    return sum(dtensor_compat.is_sharded(placement) for placement in tensor.placements)


def _version(tensor: Any) -> int:
    local = dtensor_compat.local_tensor(tensor)
    return 0 if local.is_inference() else local._version


def _bring_up_to_date(tensors: Sequence[Tensor]) -> None:
    """Arguments as the function is to see them: without reductions under way, and views as their bases are by now."""
    with torch.no_grad():
        settle(tensor for tensor in tensors if tensor.is_leaf)
        for tensor in tensors:
            lineage = getattr(tensor, _LINEAGE, None)
            if lineage is not None and lineage.version != _version(lineage.base):
                lineage.version = _version(lineage.base)
                replace(tensor, lineage.view(lineage.base.detach().full_tensor()))


# -- writing ---------------------------------------------------------------------------------------------------------


def _by_layout(func: Callable[..., Any], gradients: Sequence[Any], found: Tensor, inverse: Tensor) -> None:
    """The check of a ``GradScaler``: DTensor takes all gradients for laid out as the first, and refuses plain ones."""
    alike: dict[Any, list[Any]] = {}
    for gradient in gradients:
        layout = getattr(gradient, "device_mesh", None), getattr(gradient, "placements", None)
        alike.setdefault(layout, []).append(gradient)
    for members in alike.values():
        func(members, found, inverse)


def _change(func: Callable[..., Any], args: Any, kwargs: Any, on_whole: bool) -> Any:
    """An in-place function."""
    target, rest = args[0], args[1:]
    if not is_sharded_tensor(target):
        return func(target, *whole(rest), **whole(kwargs))
    if on_whole or hasattr(target, _LINEAGE):
        return _write(func, target, rest, kwargs)
    return _or_whole(partial(func, *args, **kwargs), lambda: _write(func, target, rest, kwargs))


def _write(func: Callable[..., Any], target: Any, args: Any, kwargs: Any) -> Any:
    """Run an in-place function on the whole of ``target``'s base, and keep this rank's part of the result."""
    lineage = getattr(target, _LINEAGE, None)
    base = target if lineage is None else lineage.base
    full = base.detach().full_tensor().clone()
    changed = full if lineage is None else lineage.view(full)
    if func(changed, *whole(args), **whole(kwargs)) is NotImplemented:
        return NotImplemented
    if changed.shape != target.shape or full.shape != base.shape:
        raise ValueError(
            f"'{getattr(func, '__name__', 'a function')}' gives a sharded tensor of shape {tuple(target.shape)} another"
            f" shape, {tuple(changed.shape)}, in place, which its ranks cannot follow. Make a new tensor"
        )
    replace(base, full)
    if lineage is not None:
        lineage.version = _version(base)
        replace(target, changed)
    return target


def write_values(target: Any, values: Tensor) -> None:
    """``target.copy_(values)``, into what ``target`` is a view of as well."""
    _write(Tensor.copy_, target, (values,), {})


def _write_out(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """A function with ``out=``, one tensor or several."""
    out, others = kwargs["out"], {key: value for key, value in kwargs.items() if key != "out"}
    spare = tree_map_only(
        Tensor, lambda tensor: whole(tensor.detach()).clone() if is_sharded_tensor(tensor) else tensor, out
    )
    result = func(*whole(args), **whole(others), out=spare)
    for target, values in zip(tree_leaves(out), tree_leaves(spare), strict=True):
        if is_sharded_tensor(target):
            if values.shape != target.shape:
                raise ValueError(
                    f"out= is a sharded tensor of shape {tuple(target.shape)}, and the result of"
                    f" '{func.__name__}' has shape {tuple(values.shape)}"
                )
            write_values(target, values)
    return out if isinstance(out, Tensor) else type(result)(out)


def _draw_like(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    like = args[0]
    return distributed(func(torch.empty(like.shape, dtype=like.dtype, device=like.device), *args[1:], **kwargs), like)


def _each(func: Callable[..., Any], args: Any, kwargs: Any, alone: bool) -> Any:
    """A function of lists; for each tensor of the first list alone where that is asked or DTensor cannot."""
    one_by_one = partial(_one_by_one, func, args, kwargs)
    return one_by_one() if alone else _or_whole(partial(func, *args, **kwargs), one_by_one)


def _one_by_one(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    count, results = len(args[0]), []
    for index in range(count):
        alone = [[a[index]] if isinstance(a, (list, tuple)) and len(a) == count else a for a in args]
        on_wholes = _meet(_tensors(alone)) or _parts_ways(func, _tensors(alone))
        if is_in_place(func.__name__):
            [target], *rest = alone
            _change(partial(_of_one, func), (target, *rest), kwargs, on_wholes)
        elif on_wholes:
            results.append(func(*whole(alone), **whole(kwargs)))
        else:
            results.append(_or_whole(partial(func, *alone, **kwargs), partial(_on_wholes, func, alone, kwargs)))
    return None if is_in_place(func.__name__) else [result for [result] in results]


def _of_one(func: Callable[..., Any], tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    return func([tensor], *args, **kwargs)


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


# -- setting .data and .grad -----------------------------------------------------------------------------------------


def _set(func: Callable[..., Any], *args: Any) -> None:
    func(*args)


def _set_data(func: Callable[..., Any], tensor: Any, value: Tensor) -> None:
    """``tensor.data = value``: other memory, as for plain tensors, so that what was kept of the old is not changed."""
    if not is_sharded_tensor(tensor):
        func(tensor, whole(value))
        return
    if value.shape != tensor.shape or value.dtype != tensor.dtype:
        raise ValueError(
            f"a sharded parameter cannot become another shape or dtype: {tuple(tensor.shape)} of {tensor.dtype} was"
            f" given data of shape {tuple(value.shape)} and {value.dtype}"
        )
    dtensor_compat.rebind_local(tensor, dtensor_compat.local_tensor(_laid_out(value, tensor)))
    setattr(tensor, _REBOUND, True)


def _set_grad(func: Callable[..., Any], tensor: Any, value: Tensor | None) -> None:
    """``tensor.grad = value``, also of a plain value or one that is laid out otherwise."""
    if value is None or value.shape != tensor.shape:
        func(tensor, value)
    else:
        func(tensor, _laid_out(value, tensor) if is_sharded_tensor(tensor) else whole(value))


def _laid_out(value: Any, like: Any) -> Any:
    """``value`` as a tensor that is sharded as ``like`` is: itself, if it is already."""
    _bring_up_to_date([value])
    if is_sharded_tensor(value) and (value.device_mesh, value.placements) == (like.device_mesh, like.placements):
        return value
    return distributed(whole(value.detach()), like)


_SETTERS = {Tensor.data: _set_data, Tensor.grad: _set_grad}


def was_rebound(tensor: Tensor) -> bool:
    """Whether ``tensor.data`` was set since this was last asked."""
    return tensor.__dict__.pop(_REBOUND, False)


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
