"""Calls for which garbage collection asks.

Garbage collection may run anywhere, also while C++ holds a lock. So a finalizer that needs C++
defers its call: the next region or change of settings runs it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

waiting: deque[Callable[[], object]] = deque()


def defer(call: Callable[[], object]) -> None:
    waiting.append(call)


def run() -> None:
    """Runs all calls that wait."""
    while waiting:
        try:
            call = waiting.popleft()
        except IndexError:  # another thread runs the last one
            return
        call()
