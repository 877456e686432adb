"""Parameters of other stages, as hooks of the module see them: known by shape, carried out where they live.

A hook that keeps averages pairs them with ``parameters()`` by position, so every parameter has to stand in its place
there, on every stage. What a hook does with a stand-in is done for real on the stage that holds the parameter. Here it
does nothing: writes into a stand-in are left out, what is computed from one is a stand-in itself, and a tensor that one
would be written into stays as it is, with a note that the parameter's own stage has its value. What has to know a value
is refused by its line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import resolve_name
from torch.utils._pytree import tree_leaves, tree_map

from lightning_effi.comm.ranks import RankWords, line_of_user
from lightning_effi.compat import dtensor as dtensor_compat
from lightning_effi.compat import torch as torch_compat
from lightning_effi.sharded_tensors.names import is_in_place

_READ = frozenset({"item", "tolist", "numpy", "equal", "allclose", "is_nonzero", "__array__", "__contains__"}) | {
    f"__{kind}__" for kind in ("bool", "float", "int", "index", "complex")
}
_DRAWN = frozenset(
    {"normal_", "uniform_", "bernoulli_", "exponential_", "log_normal_", "cauchy_", "geometric_", "random_"}
)


class OnAnotherStage(Tensor):
    """A parameter that another stage holds, or what a hook has computed from one. Outside of hooks it is full of NaN.

    Attributes:
        names: of the parameters.
        stand_ins: of the module.
        trainable: whether the parameter has gradients.
    """

    names: frozenset[str]
    stand_ins: OtherStages
    trainable: bool
    _is_param = True  # isinstance(p, nn.Parameter)

    @classmethod
    def make(
        cls, like: Tensor, names: frozenset[str], stand_ins: OtherStages, trainable: bool = False
    ) -> OnAnotherStage:
        """Of the shape, dtype and device of ``like``, without memory."""
        kind = like.dtype if like.dtype.is_floating_point or like.dtype.is_complex else None
        value = torch.full((), float("nan") if kind else 0.0, device=like.device).to(like.dtype).expand(like.shape)
        made = value.as_subclass(cls)
        made.names, made.stand_ins, made.trainable = names, stand_ins, trainable
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, OnAnotherStage)]
        if not found or not found[0].stand_ins.are_seen:
            with torch_compat.without_subclass_dispatch():
                return func(*args, **kwargs)
        return found[0].stand_ins.answer(func, args, kwargs, found)

    def __deepcopy__(self, memo: dict[int, Any]) -> OnAnotherStage:
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        with torch_compat.without_subclass_dispatch():
            return self.as_subclass(Tensor).__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"<{', '.join(sorted(self.names))}, {list(self.shape)}, on another pipeline stage>"


class OtherStages:
    """Makes the stand-ins of a stage, answers torch's functions for them, and knows what they were to be written into.

    Args:
        words: tells whether a hook of the module is running.
    """

    def __init__(self, words: RankWords) -> None:
        self._words = words
        self._followers: dict[int, tuple[StorageWeakRef, str]] = {}
        self._numels: dict[str, int] = {}

    def parameter(self, name: str, like: Tensor, trainable: bool) -> OnAnotherStage:
        """The stand-in of one parameter."""
        self._numels[name] = like.numel()
        return OnAnotherStage.make(like, frozenset({name}), self, trainable)

    @property
    def are_seen(self) -> bool:
        return self._words.in_hook

    def parameter_behind(self, tensor: Tensor) -> str | None:
        """The parameter of another stage that ``tensor`` would have followed."""
        reference, name = self._followers.get(_memory_of(tensor), (None, None))
        return None if reference is None or reference.expired() else name

    def answer(self, func: Any, args: Any, kwargs: Any, found: Sequence[OnAnotherStage]) -> Any:
        """What a hook gets that calls ``func`` with stand-ins among its arguments."""
        path = resolve_name(func) or getattr(func, "__name__", "")
        name = path.rpartition(".")[2]
        if name in ("__get__", "__set__"):
            return self._attribute(path.split(".")[-2], name, func, args)
        if name in _READ:
            self._refuse(name, found)
        if name == "requires_grad_":
            return args[0]
        if name.startswith("_foreach_"):
            return self._for_each(func, name, args, kwargs, found)
        if is_in_place(name) or kwargs.get("out") is not None:
            return self._write(func, name, args, kwargs, found)
        with torch_compat.without_subclass_dispatch():
            result = func(*args, **kwargs)
        names = frozenset().union(*(stand_in.names for stand_in in found))
        return tree_map(
            lambda leaf: OnAnotherStage.make(leaf, names, self) if isinstance(leaf, Tensor) else leaf, result
        )

    def _attribute(self, attribute: str, access: str, func: Any, args: Any) -> Any:
        owner = args[0]
        if access == "__set__":
            if not isinstance(owner, OnAnotherStage):
                self._follow(owner, args[1])
            return None
        if attribute == "requires_grad":
            return owner.trainable
        if attribute == "data":
            return owner
        if attribute == "grad":
            return None
        with torch_compat.without_subclass_dispatch():
            result = func(*args)
        return OnAnotherStage.make(result, owner.names, self) if isinstance(result, Tensor) else result

    def _write(self, func: Any, name: str, args: Any, kwargs: Any, found: Sequence[OnAnotherStage]) -> Any:
        target = args[0] if kwargs.get("out") is None else kwargs["out"]
        if not isinstance(target, Tensor):
            self._refuse(name, found)
        if isinstance(target, OnAnotherStage):
            if name in _DRAWN:  # the numbers that are drawn next must be those of one process
                func(torch.empty(target.shape, dtype=target.dtype), *args[1:], **kwargs)
            return target
        for stand_in in found:
            self._follow(target, stand_in)
        return target

    def _for_each(self, func: Any, name: str, args: Any, kwargs: Any, found: Sequence[OnAnotherStage]) -> Any:
        """A function of lists does for each place what it would do alone."""
        lists = [value for value in (*args, *kwargs.values()) if isinstance(value, (list, tuple))]
        if any(isinstance(value, OnAnotherStage) for value in (*args, *kwargs.values())):
            self._refuse(name, found)
        mine = {
            place: [each[place] for each in lists if isinstance(each[place], OnAnotherStage)]
            for place in range(len(lists[0]))
        }
        if not is_in_place(name):
            with torch_compat.without_subclass_dispatch():
                results = list(func(*args, **kwargs))
            return [
                OnAnotherStage.make(result, frozenset().union(*(s.names for s in mine[place])), self)
                if mine[place]
                else result
                for place, result in enumerate(results)
            ]
        for place, stand_ins in mine.items():
            for stand_in in stand_ins:
                if not isinstance(lists[0][place], OnAnotherStage):
                    self._follow(lists[0][place], stand_in)
        kept = [place for place, stand_ins in mine.items() if not stand_ins]
        if kept:

            def part(value: Any) -> Any:
                return [value[place] for place in kept] if isinstance(value, (list, tuple)) else value

            func(*map(part, args), **{key: part(value) for key, value in kwargs.items()})
        return args[0]

    def _follow(self, target: Tensor, stand_in: OnAnotherStage) -> None:
        """``target`` is left as it is here; the stage of the parameter has its value.

        Raises:
            RuntimeError: where that is no single stage.
        """
        key = _memory_of(target)
        before = self.parameter_behind(target)
        name = min(stand_in.names)
        if len(stand_in.names) > 1 or target.shape != stand_in.shape or target.numel() != self._numels.get(name):
            self._refuse("what is computed from it", [stand_in])
        if before not in (None, name):
            self._refuse(f"a tensor that follows '{before}' too", [stand_in])
        storage = dtensor_compat.local_tensor(target).untyped_storage()
        self._followers[key] = (StorageWeakRef(storage), name)

    def _refuse(self, what: str, found: Sequence[OnAnotherStage]) -> None:
        names = sorted(frozenset().union(*(stand_in.names for stand_in in found)))
        shown = f"'{names[0]}'" + (f" and {len(names) - 1} more" if len(names) > 1 else "")
        raise RuntimeError(
            f"pipeline: {what} needs the value of {shown} ({line_of_user()}), which another stage holds. In hooks,"
            " averages may follow parameters one by one, and named_parameters() gives those of this stage. For norms"
            " use trainer.strategy.last_grad_norm or HealthCheck, or use pipeline_parallel_size=1"
        )


class AllParameters:
    """``module.parameters()`` of a module some of whose parameters other stages hold.

    In hooks all of them are there, in the order of the whole module; otherwise those of this stage.
    """

    def __init__(
        self, module: nn.Module, stand_ins: OtherStages, missing: Mapping[tuple[int, str], OnAnotherStage]
    ) -> None:
        self._module, self._stand_ins, self._missing = module, stand_ins, missing

    def __call__(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        own = type(self._module).parameters(self._module, recurse)
        return self._all(recurse) if self._stand_ins.are_seen else own

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        twin = memo.get(id(self._module))
        return self if twin is None else type(twin).parameters.__get__(twin)

    def __reduce__(self) -> Any:
        return getattr, (self._module, "parameters")

    def _all(self, recurse: bool) -> Iterator[Any]:
        seen: set[int] = set()
        for module in self._module.modules() if recurse else [self._module]:
            for key, parameter in module._parameters.items():
                found = parameter if parameter is not None else self._missing.get((id(module), key))
                if found is not None and id(found) not in seen:
                    seen.add(id(found))
                    yield found


def _memory_of(tensor: Tensor) -> int:
    return dtensor_compat.local_tensor(tensor).untyped_storage()._cdata
