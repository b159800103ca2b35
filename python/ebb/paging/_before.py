"""State that is restored before a step runs again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from ebb import _C


class Before:
    """A copy of the state before a step's first run: random states, gradients, and buffers."""

    def __init__(self, state: Iterable[torch.nn.Module | torch.Tensor]) -> None:
        generators = [torch.default_generator, *_C.device_generators()]
        self._random = [(generator, generator.get_state()) for generator in generators]
        self._gradients: dict[int, tuple[torch.Tensor, torch.Tensor | None, Any]] = {}
        self._written: list[tuple[torch.Tensor, torch.Tensor]] = []
        for part in state:
            if isinstance(part, torch.nn.Module):
                self._written += [(buffer, buffer.clone()) for buffer in part.buffers()]
                self._keep_gradients(part.parameters())
            elif isinstance(part, torch.Tensor):
                self._written.append((part, part.detach().clone()))
            else:
                raise TypeError(
                    f"ebb: state must consist of modules and tensors; got {type(part).__name__}"
                )

    def keep_gradients_of(self, outputs: Iterable[Any], inputs: Iterable[Any]) -> None:
        """Call before a backward from `outputs`, for these inputs or all leaves."""
        self._keep_gradients(_leaves_behind(outputs))
        self._keep_gradients(x for x in inputs if isinstance(x, torch.Tensor))

    def _keep_gradients(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            if id(tensor) not in self._gradients and (tensor.is_leaf or tensor.retains_grad):
                grad = tensor.grad
                copy = None if grad is None else grad.detach().clone()
                self._gradients[id(tensor)] = (tensor, grad, copy)

    @torch.no_grad()
    def put_back(self) -> None:
        for generator, state in self._random:
            generator.set_state(state)
        for leaf, grad, copy in self._gradients.values():
            leaf.grad = grad
            if grad is not None:
                grad.copy_(copy)
        for tensor, copy in self._written:
            tensor.copy_(copy)


def _leaves_behind(roots: Iterable[Any]) -> Iterator[torch.Tensor]:
    """The leaves to whose ``grad`` a backward from these tensors or gradient edges would add."""
    yield from _C.leaves_behind([root for root in roots if isinstance(root, torch.Tensor)])
    todo = [root.node for root in roots if not isinstance(root, torch.Tensor)]
    seen = set(todo)
    while todo:
        node = todo.pop()
        if hasattr(node, "variable"):
            yield node.variable
        following = {edge for edge, _ in node.next_functions if edge is not None} - seen
        seen |= following
        todo += following
