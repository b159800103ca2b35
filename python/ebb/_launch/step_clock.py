"""Finds where a job's steps begin and end, from its optimizers."""

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

_LONGEST = 10  # maximum length of a cycle, in steps of the most frequent optimizer
_SILENT = 3 * _LONGEST  # steps of another optimizer, after which an optimizer counts as finished


# Note [Steps of a job]
# A step lies between two steps of one optimizer, the leader, so all forwards whose gradients are
# accumulated belong to one step. The leader is the first optimizer that steps. An optimizer that
# steps more rarely takes its place, if at most ten of the leader's steps lie between two of its
# own: a generator whose critic steps five times. ebb does not wait for an optimizer that steps more
# rarely still. If the leader is silent for long, or freed, the next optimizer that steps becomes
# the leader: a job may have several stages.


class StepClock:
    """Calls a function at the end of each step."""

    def __init__(
        self, at_boundary: Callable[[bool], None], has_no_end: Callable[[str], None]
    ) -> None:
        # Receives False if another optimizer marks the steps from now on.
        self._at_boundary = at_boundary
        self._has_no_end = has_no_end  # called instead, with the reason
        self._thread: int | None = None  # the thread of the first optimizer step
        self._elsewhere = 0  # steps on other threads
        self._leader: weakref.ref[torch.optim.Optimizer] | None = None
        self._count = 0  # steps of the leader
        # For each other optimizer: the leader's count at its last step, and its number of steps at
        # that count.
        self._others: weakref.WeakKeyDictionary[Any, tuple[int, int]] = weakref.WeakKeyDictionary()
        self.optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()

    def start(self, undo: ExitStack) -> None:
        undo.callback(register_optimizer_step_post_hook(self._on_step).remove)

    def _on_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if is_compiling():
            return
        if torch._C._current_graph_task_id() != -1:
            self._has_no_end(
                "an optimizer steps during backward, so ebb cannot tell where a step ends; use "
                "ebb.apply with a policy instead of a budget"
            )
            return
        if _C.in_region():
            return
        self._thread = self._thread or get_ident()
        self._elsewhere += self._thread != get_ident()
        if self._thread != get_ident() and self._elsewhere <= _SILENT:
            # The first thread reports this, since a recording must end on the thread of its begin.
            return
        if self._elsewhere:
            self._has_no_end(
                "optimizers step on several threads, so ebb cannot tell where a step ends"
            )
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
