"""Where the steps of a job begin and end, as its optimizers tell it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import ExitStack
from threading import get_ident
from typing import Any

import torch
from torch.compiler import is_compiling
from torch.optim.optimizer import register_optimizer_step_post_hook

from ebb import _C

_LONGEST = 10  # of a cycle, in steps of the optimizer that steps most often
_SILENT = 3 * _LONGEST  # steps of another optimizer, after which one is thought to be done with


# Note [Steps of a job]
# A step is what lies between two steps of one optimizer, so that what gradients are accumulated
# from is one step. Which optimizer that is: the first one that steps, or one that steps more
# rarely, once in at most ten of its steps: a generator whose critic steps five times. One that
# steps still more rarely is not waited for. If it is silent for long, or gone, it is the next that
# steps: a job may have several stages.


class StepClock:
    """Calls a function at the end of each step.

    Args:
        at_boundary: is told whether the step that ends now is like those that follow; it is not if
            another optimizer tells the steps from now on.
        has_no_end: is called in its place, with the reason, where no step has an end.
    """

    def __init__(
        self, at_boundary: Callable[[bool], None], has_no_end: Callable[[str], None]
    ) -> None:
        self._at_boundary = at_boundary
        self._has_no_end = has_no_end
        self._thread: int | None = None  # on which optimizers step
        self._elsewhere = 0  # steps on other threads
        self._leader: weakref.ref[torch.optim.Optimizer] | None = None
        self._count = 0  # of its steps
        # Of others: the count at their last step, and how often they stepped since.
        self._others: weakref.WeakKeyDictionary[Any, tuple[int, int]] = weakref.WeakKeyDictionary()
        self.optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()

    def start(self, undo: ExitStack) -> None:
        """From now on, until `undo` is closed."""
        undo.callback(register_optimizer_step_post_hook(self._on_step).remove)

    def _on_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if is_compiling():
            return
        if torch._C._current_graph_task_id() != -1:
            self._has_no_end("an optimizer steps while backward runs, so no step has an end")
            return
        if _C.in_region():
            return
        self._thread = self._thread or get_ident()
        self._elsewhere += self._thread != get_ident()
        if self._thread != get_ident() and self._elsewhere <= _SILENT:
            return  # told on the first thread: what is recorded there ends there
        if self._elsewhere:
            self._has_no_end("optimizers step on several threads, so no step has an end")
            return
        self.optimizers.add(optimizer)
        leader = self._leader and self._leader()
        if leader is None or (leader is not optimizer and self._takes_over(optimizer)):
            self._leader, self._count = weakref.ref(optimizer), 0
            self._others.clear()
            self._at_boundary(False)
        elif leader is optimizer:
            self._count += 1
            self._at_boundary(True)

    def _takes_over(self, optimizer: torch.optim.Optimizer) -> bool:
        before, since = self._others.get(optimizer, (None, 0))
        since = since + 1 if before == self._count else 1
        self._others[optimizer] = (self._count, since)
        is_rarer = before is not None and 1 < self._count - before <= _LONGEST
        return is_rarer or since > _SILENT
