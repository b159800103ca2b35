"""The current run of a step's function, and the threads that are part of it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch

from ebb.paging._agreement import Agreement
from ebb.paging._before import Before


class Attempt:
    """One run of the function of a step.

    Attributes:
        agreement: between processes, on the validity of the run.
        before: the state to restore before another run; None if there will be none.
    """

    def __init__(self, agreement: Agreement, before: Before | None) -> None:
        self.agreement = agreement
        self.before = before
        self._threads = {threading.current_thread()}

    # Note [Threads of a step]
    # Other threads may run backwards of their own during the step, and a second run of the step
    # does not compute their gradients again. So ebb restores only gradients of the step's own
    # threads: the thread that called run_step, the threads started from it directly or indirectly,
    # and autograd's threads, which Python did not start. Optimizers of these threads belong to the
    # step.
    def has_this_thread(self) -> bool:
        thread = threading.current_thread()
        if thread in self._threads:
            return True
        in_backward: bool = torch._C._current_graph_task_id() != -1
        return in_backward and isinstance(thread, threading._DummyThread)

    def add(self, thread: threading.Thread) -> None:
        self._threads.add(thread)


_current: Attempt | None = None
_run_backward: Any = None  # torch's original, once run_step has been called
_start_thread: Any = None  # Python's original, likewise


def is_any() -> bool:
    """True if run_step is running in any thread."""
    return _current is not None


def of_this_thread() -> Attempt | None:
    attempt = _current
    return attempt if attempt is not None and attempt.has_this_thread() else None


def _start_and_note(self: threading.Thread) -> None:
    attempt = of_this_thread()
    if attempt is not None:
        attempt.add(self)
    _start_thread(self)


def _keep_gradients_and_run(outputs: Any, *args: Any, **kwargs: Any) -> Any:
    attempt = of_this_thread()
    if attempt is not None and attempt.before is not None and kwargs.get("accumulate_grad", True):
        inputs = args[3] if len(args) > 3 and args[3] else ()
        attempt.before.keep_gradients_of(outputs, inputs)
    return _run_backward(outputs, *args, **kwargs)


@contextlib.contextmanager
def going_on(attempt: Attempt) -> Iterator[None]:
    """Makes `attempt` the current run, and copies gradients before a backward adds to them. Only
    one attempt runs at a time: see step()."""
    global _current, _run_backward, _start_thread
    autograd: Any = torch.autograd
    if _run_backward is None:
        _run_backward = autograd._engine_run_backward
        autograd._engine_run_backward = _keep_gradients_and_run
        _start_thread = threading.Thread.start
        threading.Thread.start = _start_and_note  # type: ignore[method-assign]
    _current = attempt
    try:
        yield
    finally:
        _current = None
