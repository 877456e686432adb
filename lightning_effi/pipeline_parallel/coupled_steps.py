"""Updates that need more than one parameter: a stage's optimizer holds only those of its stage.

A norm over all parameters would be the stage's norm. The first update of every optimizer that is not known to work
element by element is watched: each operator's result depends on the parameters that its arguments depend on, and a
parameter that is written with what depends on another one couples them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_effi.compat import dtensor as dtensor_compat
from lightning_effi.compat import timm as timm_compat
from lightning_effi.gradients.clipping import gradient_norm
from lightning_effi.pipeline_parallel.stage_parameters import StageParameters

Names = frozenset[str]
_NOBODY: Names = frozenset()


class StageStep:
    """Entered around an optimizer's update, after gradients were clipped.

    Args:
        optimizer: of this stage.
        stages: over which norms are taken, and whose parameters this stage's are.
    """

    def __init__(self, optimizer: Optimizer, stages: StageParameters) -> None:
        self._optimizer, self._stages = optimizer, stages
        self._is_checked = False
        self._entered = ExitStack()

    def enter(self) -> None:
        watch = None
        if not self._is_checked:
            watch = self._entered.enter_context(_Dependencies(self._optimizer, self._stages.local))
        if timm_compat.clips_by_norm(self._optimizer):
            norm = self._norm if watch is None else lambda: watch.unwatched(self._norm)
            self._entered.enter_context(timm_compat.clip_norm_replaced(self._optimizer, norm))

    def exit(self) -> None:
        self._entered.close()
        self._is_checked = True

    def _norm(self) -> Tensor:
        return gradient_norm(
            (p for group in self._optimizer.param_groups for p in group["params"]), stages=self._stages
        )


class _Dependencies(TorchDispatchMode):
    """On which parameters each tensor depends, by its memory."""

    def __init__(self, optimizer: Optimizer, parameters: Mapping[str, nn.Parameter]) -> None:
        super().__init__()
        self._optimizer = type(optimizer).__name__
        self._written = {_memory(parameter): name for name, parameter in parameters.items()}
        self._known: dict[int, Names] = {key: frozenset({name}) for key, name in self._written.items()}
        for name, parameter in parameters.items():
            state = optimizer.state.get(parameter, {})
            for tensor in (parameter.grad, *state.values()):
                if isinstance(tensor, Tensor):
                    self._known[_memory(tensor)] = frozenset({name})
        self._read: Names = _NOBODY
        self._is_watching = True

    def unwatched(self, call: Callable[[], Tensor]) -> Tensor:
        """What ``call`` gives depends on nothing: it is the same on all stages."""
        self._is_watching = False
        try:
            result = call()
        finally:
            self._is_watching = True
        self._known[_memory(result)] = _NOBODY
        return result

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self._is_watching:
            return func(*args, **kwargs)
        lists = _lists(args, kwargs)
        together = self._of(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
        if func.overloadpacket.__name__ == "_local_scalar_dense":
            self._read |= together
        by_place = lists is not None and "_foreach_" in func.overloadpacket.__name__
        for position, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            for place, tensor in enumerate(value if isinstance(value, (list, tuple)) else [value]):
                if isinstance(tensor, Tensor):
                    self._write(tensor, self._at(lists, place) if by_place and lists else together)
        result = func(*args, **kwargs)
        self._note(result, together, lists if by_place else None)
        return result

    def _write(self, target: Tensor, names: Names) -> None:
        key = _memory(target)
        mine = self._written.get(key)
        if mine is not None:
            others = sorted((names | self._read) - {mine})
            if others:
                raise RuntimeError(
                    f"pipeline: {self._optimizer} updates '{mine}' with what it computes from '{others[0]}' too"
                    f"{f' and {len(others) - 1} more' if len(others) > 1 else ''}, and the optimizer of a stage holds"
                    " the parameters of its stage only. Use an optimizer that treats parameters one by one"
                    " (gradient_clip_val of the Trainer clips by the norm over all stages), or pipeline_parallel_size=1"
                )
            self._read = _NOBODY
        self._known[key] = self._known.get(key, _NOBODY) | names

    def _note(self, result: Any, together: Names, lists: list[Any] | None) -> None:
        results = result if isinstance(result, (list, tuple)) else [result]
        for place, tensor in enumerate(results):
            if isinstance(tensor, Tensor) and _memory(tensor) not in self._written:
                self._known[_memory(tensor)] = self._at(lists, place) if lists else together

    def _at(self, lists: list[Any], place: int) -> Names:
        return self._of(each[place] for each in lists if place < len(each) and isinstance(each[place], Tensor))

    def _of(self, tensors: Iterable[Tensor]) -> Names:
        return frozenset().union(*(self._known.get(_memory(tensor), _NOBODY) for tensor in tensors))


def _lists(args: Any, kwargs: Any) -> list[Any] | None:
    found = [value for value in (*args, *kwargs.values()) if isinstance(value, (list, tuple))]
    return found or None


def _memory(tensor: Tensor) -> int:
    return dtensor_compat.local_tensor(tensor).untyped_storage()._cdata
