"""The current run of a step's function: the state before, the threads that take part, and the
optimizers, which refuse the invalid gradients of a step with an overflow."""

from __future__ import annotations

import _thread
import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ebb import _C
from ebb.experimental.paging._agreement import USED, Agreement, PageOverflowError


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
        """Copies the gradients of `inputs`, and of the leaves that a backward from `outputs` would
        reach. Call before that backward."""
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


class Attempt:
    """One run of the function of a step."""

    def __init__(self, agreement: Agreement, before: Before | None) -> None:
        self.agreement = agreement
        self.before = before  # the state to restore before another run; None if there is none
        self.threads = {threading.current_thread()}  # see Note [Threads of a step]

    # Note [Threads of a step]
    # Other threads may run backwards of their own during the step, and a second run of the step
    # does not compute their gradients again. So ebb restores only gradients of the step's own
    # threads: the thread that called run_step, the threads started from it directly or indirectly,
    # and autograd's threads, which Python did not start. Optimizers of these threads belong to the
    # step.
    def has_this_thread(self) -> bool:
        thread = threading.current_thread()
        if thread in self.threads:
            return True
        in_backward: bool = torch._C._current_graph_task_id() != -1
        return in_backward and isinstance(thread, threading._DummyThread)


_current: Attempt | None = None


def is_any() -> bool:
    """True if run_step is running in any thread."""
    return _current is not None


def of_this_thread() -> Attempt | None:
    attempt = _current
    return attempt if attempt is not None and attempt.has_this_thread() else None


def _before_thread(function: Any, *_: Any, **__: Any) -> None:
    """Notes a thread that one of the attempt's threads is about to start."""
    attempt, thread = of_this_thread(), getattr(function, "__self__", None)
    if attempt is not None and isinstance(thread, threading.Thread):
        attempt.threads.add(thread)


def _before_backward(
    tensors: Any,
    grad_tensors: Any = None,
    keep_graph: bool = False,
    create_graph: bool = False,
    inputs: Any = None,
    allow_unreachable: bool = False,
    accumulate_grad: bool = False,
    **_: Any,
) -> None:
    """Copies the gradients to which a backward is about to add. Parameters: as
    ``run_backward``'s."""
    attempt = of_this_thread()
    if attempt is not None and attempt.before is not None and accumulate_grad:
        attempt.before.keep_gradients_of(tensors, inputs or ())


# Note [A step's backwards and threads]
# A backward or thread that ebb does not see would add its gradients twice when the step runs again,
# and no error would say so. So ebb does not replace torch.autograd's or threading's functions,
# which other code replaces and restores too (torch.compiler). ebb watches the C functions that all
# of them call: see Note [Watched functions].
@functools.cache
def _watch() -> None:
    engine: Any = torch._C
    watched: list[tuple[Any, str, Any]] = [
        (engine._ImperativeEngine, "run_backward", _before_backward)
    ]
    for name in ("start_new_thread", "start_joinable_thread"):
        if hasattr(_thread, name):  # the second is new in Python 3.13
            watched.append((_thread, name, _before_thread))
    for owner, name, told in watched:
        if not _C.watch(getattr(owner, name), _C.Watch.TOLD, told):
            raise RuntimeError(
                f"ebb: paging.run_step() must see each backward and thread of the step, but "
                f"other code has replaced {owner.__name__}.{name}. Call paging.run_step() "
                "before that code, or do without run_step() and call paging.step_ok()."
            )


@contextlib.contextmanager
def going_on(attempt: Attempt) -> Iterator[None]:
    """Makes `attempt` the current run. Only one attempt runs at a time: see step()."""
    global _current
    _watch()
    _current = attempt
    try:
        yield
    finally:
        _current = None


def _has_no_errors() -> bool:
    # paging_step_ok() alone would raise during graph capture, when new errors are not visible.
    return _C.paging_errors()[0] == 0 or _C.paging_step_ok()


def _check_gradients(optimizer: Any) -> None:
    """Raises if gradients are invalid that an optimizer or a scaler is about to use."""
    attempt = of_this_thread()
    if attempt is not None and (attempt.agreement.refusal or not attempt.agreement.used):
        if not attempt.agreement.ask(_has_no_errors):
            raise PageOverflowError(attempt.agreement.refusal)
        return
    errors, untold = _C.paging_errors()  # lacks new errors during graph capture: see found_inf
    if not errors or (not untold and _are_finite(optimizer)):
        return
    with contextlib.suppress(RuntimeError):
        _C.paging_step_ok()  # makes ebb record the next step
    advice = (
        "Call paging.step_ok() before the optimizer, and if it returns False, clear the "
        "gradients and run the step again; ebb.experimental.paging.run_step() does all of this."
    )
    raise PageOverflowError(
        f"ebb: an optimizer is about to use invalid gradients, because paging failed in this step: "
        f"{_C.describe_page_errors(errors)}. "
        f"{advice if attempt is None else USED}"
    )


def _are_finite(optimizer: Any) -> bool:
    """True if the optimizer's gradients are finite. After ebb has reported the error, an optimizer
    with finite gradients may step, because it may belong to another model."""
    tensors = [tensor for group in optimizer.param_groups for tensor in group["params"]]
    grads = [tensor.grad for tensor in tensors if tensor.grad is not None]
    return all(bool(grad.isfinite().all()) for grad in grads)


def _before_optimizer(optimizer: Any, args: Any, kwargs: Any) -> Any:
    """Checks the gradients before an optimizer steps: at once, or after its closure ran."""
    closure = kwargs.get("closure") or next(filter(callable, args[1:]), None)
    if closure is None:
        _check_gradients(optimizer)
        return None

    def checked() -> Any:
        loss = closure()
        _check_gradients(optimizer)
        return loss

    given = tuple(checked if value is closure else value for value in args[1:])
    named = {name: checked if value is closure else value for name, value in kwargs.items()}
    return (args[0], *given), named


def _checking_first(unscale: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    @functools.wraps(unscale)
    def checked(scaler: Any, optimizer: Any) -> None:
        _check_gradients(optimizer)
        unscale(scaler, optimizer)

    checked.checks_first = True  # type: ignore[attr-defined]
    return checked


def _scalers(scaler: type[Any] = torch.amp.GradScaler) -> Iterator[type[Any]]:
    yield scaler
    for derived in scaler.__subclasses__():
        yield from _scalers(derived)


def guard_optimizers() -> None:
    """Make optimizers refuse invalid gradients from now on, for policies with PAGE. Gradient
    scalers refuse them too; otherwise they would skip the optimizer's step and lower the scale."""
    global _guard
    if _guard is None:
        _guard = register_optimizer_step_pre_hook(_before_optimizer)
    for scaler in _scalers():
        unscale = vars(scaler).get("unscale_")
        if unscale is not None and not hasattr(unscale, "checks_first"):
            scaler.unscale_ = _checking_first(unscale)


_guard: Any = None
