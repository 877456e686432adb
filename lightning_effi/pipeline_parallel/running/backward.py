"""The backward of one stage, whole or in two halves.

Zero-bubble schedules (arXiv:2401.10241) send the gradients of a stage's inputs on at once and compute those of its
parameters later. Autograd has no such halves, but it only computes what is asked for: the first half asks for the
inputs, and notes the gradients that arrive at each node where a branch to parameters leaves the path to the inputs (for
a linear layer: its product). The second half goes on from these nodes into the branches.

Parameters that are reached from several such nodes, or on no path to an input (an embedding in the middle, the first
stage), get their gradients in the first half, where autograd adds up what belongs together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge


def differentiable(outputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Those that have a graph, with their gradients, which come for the floating-point ones in their order."""
    floating = [tensor for tensor in outputs if tensor.is_floating_point()]
    pairs = [(t, g) for t, g in zip(floating, gradients, strict=True) if t.requires_grad]
    return [t for t, _ in pairs], [g for _, g in pairs]


def backward_of_inputs(
    outputs: Sequence[Tensor], gradients: Sequence[Tensor] | None, inputs: Iterable[Tensor]
) -> Callable[[], None]:
    """The first half of a backward; returns the second.

    Args:
        outputs: tensors with a graph.
        gradients: of these; ``None`` for a loss.
        inputs: leaves, whose ``grad`` is set now.

    Returns:
        a function that adds to the ``grad`` of the parameters that are still missing.
    """
    leaves_of_inputs = {get_gradient_edge(tensor).node for tensor in inputs}
    if not leaves_of_inputs or not outputs:
        if outputs:
            torch.autograd.backward(outputs, gradients)
        return _nothing
    roots = [get_gradient_edge(tensor).node for tensor in outputs]
    branches, leaves = _find_branches(roots, leaves_of_inputs)
    branches_to: dict[Node, list[Node | None]] = {}
    for branch, reached in branches.items():
        for leaf in reached:
            branches_to.setdefault(leaf, []).append(branch)
    late: dict[Node, list[Node]] = {}
    for leaf, found in branches_to.items():
        if len(found) == 1 and found[0] is not None:
            late.setdefault(found[0], []).append(leaf)
    put_off = {leaf for reached in late.values() for leaf in reached}
    replays = [_Replay(node, [_variable(leaf) for leaf in reached]) for node, reached in late.items()]
    now = [_variable(leaf) for leaf in leaves if leaf not in put_off]
    if now:
        torch.autograd.backward(outputs, gradients, inputs=now, retain_graph=bool(replays))

    def backward_of_parameters() -> None:
        while replays:  # what a finished one holds is freed
            replays.pop().run()

    return backward_of_parameters


class _Replay:
    """Notes the gradients that arrive at a node, and lets autograd start from there again.

    Where it starts, autograd would call the tensor hooks of users on the node's gradients a second time; the same hook
    that notes them puts the noted ones back after that.
    """

    def __init__(self, node: Node, variables: list[Tensor]) -> None:
        self._node, self._variables = node, variables
        self._noted: tuple[Tensor | None, ...] | None = None
        self._hook = node.register_prehook(self._note)

    def run(self) -> None:
        found = [(index, gradient) for index, gradient in enumerate(self._noted or ()) if gradient is not None]
        try:
            if found:
                edges = [GradientEdge(self._node, index) for index, _ in found]
                torch.autograd.backward(edges, [gradient for _, gradient in found], inputs=self._variables)  # type: ignore[arg-type]
        finally:
            self._hook.remove()  # or the node, its hook and this object would keep each other alive

    def _note(self, gradients: tuple[Tensor, ...]) -> Any:
        if self._noted is None:
            self._noted = gradients
            return None
        return self._noted


def _find_branches(roots: Sequence[Node], inputs: set[Node]) -> tuple[dict[Node | None, set[Node]], list[Node]]:
    """Which leaves are reached over branches, by the node on a path to ``inputs`` where their branch begins.

    Returns:
        the leaves of each branch (``None``: begins at a root, not on a path to inputs), and all leaves.
    """
    order = _children_first(roots)
    on_path = set(inputs)
    below: dict[Node, set[Node]] = {}  # leaves, for nodes beside the path
    branches: dict[Node | None, set[Node]] = {}
    for node in order:
        children = [child for child, _ in node.next_functions if child is not None]
        if any(child in on_path for child in children):
            on_path.add(node)
            branches[node] = set().union(*(below[child] for child in children if child not in on_path))
        elif node not in inputs:
            below[node] = {node} if _is_leaf(node) else set().union(*(below[child] for child in children))
    branches[None] = set().union(*(below[root] for root in roots if root not in on_path))
    return branches, [node for node in order if _is_leaf(node)]


def _children_first(roots: Sequence[Node]) -> list[Node]:
    order: list[Node] = []
    seen: set[Node] = set()
    stack = [(root, False) for root in roots]
    while stack:
        node, done = stack.pop()
        if done:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack += [(child, False) for child, _ in node.next_functions if child is not None]
    return order


def _is_leaf(node: Node) -> bool:
    """Whether this is an ``AccumulateGrad``; a node of a user's Function may have any attribute, but has a next one."""
    return not node.next_functions and hasattr(node, "variable")


def _variable(leaf: Node) -> Tensor:
    """The tensor whose gradients an ``AccumulateGrad`` node adds up."""
    return leaf.variable  # type: ignore[attr-defined, no-any-return]


def _nothing() -> None:
    pass
