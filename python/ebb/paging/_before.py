"""What running a step again must find as it was before its first run."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from ebb import _C


class Before:
    """What running a step again must find as it was: random states, gradients, and buffers."""

    def __init__(self, state: Iterable[torch.nn.Module | torch.Tensor]) -> None:
        self.threads = {threading.current_thread()}  # see Note [Threads of a step]
        generators = [torch.default_generator, *_C.device_generators()]
        self._random = [(generator, generator.get_state()) for generator in generators]
        self._gradients: dict[int, tuple[torch.Tensor, torch.Tensor | None, Any]] = {}
        self._written: list[tuple[torch.Tensor, torch.Tensor]] = []
        for part in state:
            if isinstance(part, torch.nn.Module):
                self._written += [(buffer, buffer.clone()) for buffer in part.buffers()]
                self.keep_gradients(part.parameters())
            elif isinstance(part, torch.Tensor):
                self._written.append((part, part.detach().clone()))
            else:
                raise TypeError(f"ebb: state takes modules and tensors; got {type(part).__name__}")

    def keep_gradients(self, tensors: Iterable[torch.Tensor]) -> None:
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


_before: Before | None = None  # of the step that run_step runs for the first time
_run_backward: Any = None  # torch's, once run_step has been called
_start_thread: Any = None  # likewise Python's


def _leaves_behind(roots: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Whose ``grad`` a backward from these tensors or gradient edges would add to."""
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


# Note [Threads of a step]
# Other threads may run backwards of their own meanwhile, whose gradients nobody computes again. So
# those of the step are kept only: of backwards in the thread that called run_step, in threads that
# such a thread has started, and in autograd's own threads, which are none of Python's.


def _is_the_steps(before: Before) -> bool:
    thread = threading.current_thread()
    if thread in before.threads:
        return True
    in_backward: bool = torch._C._current_graph_task_id() != -1
    return in_backward and isinstance(thread, threading._DummyThread)


def _start_and_note(self: threading.Thread) -> None:
    before = _before
    if before is not None and _is_the_steps(before):
        before.threads.add(self)
    _start_thread(self)


def _keep_gradients_and_run(outputs: Any, *args: Any, **kwargs: Any) -> Any:
    before = _before
    if before is not None and kwargs.get("accumulate_grad", True) and _is_the_steps(before):
        inputs = args[3] if len(args) > 3 and args[3] else ()
        before.keep_gradients(_leaves_behind(outputs))
        before.keep_gradients(x for x in inputs if isinstance(x, torch.Tensor))
    return _run_backward(outputs, *args, **kwargs)


@contextlib.contextmanager
def gradients_kept(before: Before) -> Iterator[None]:
    """Inside, gradients are copied before a backward adds to them. One at a time: see step()."""
    global _before, _run_backward, _start_thread
    autograd: Any = torch.autograd
    if _run_backward is None:
        _run_backward = autograd._engine_run_backward
        autograd._engine_run_backward = _keep_gradients_and_run
        _start_thread = threading.Thread.start
        threading.Thread.start = _start_and_note  # type: ignore[method-assign]
    _before = before
    try:
        yield
    finally:
        _before = None
