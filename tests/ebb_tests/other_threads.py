"""Work on other threads, at the same time as a test."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch

from ebb import _testing
from ebb_tests.time_limits import HANGS

Result = TypeVar("Result")


def together(work: Callable[[int], object], count: int) -> None:
    """Runs `work(0)`, `work(1)`, .. at the same time, each on a thread of its own."""
    threads = [threading.Thread(target=work, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def in_thread(function: Callable[[], Result]) -> Result:
    result = []
    thread = threading.Thread(target=lambda: result.append(function()))
    thread.start()
    thread.join()
    return result[0]


def run_in_threads(*functions: Callable[[], object]) -> None:
    """Runs each function on a thread of its own, all at the same time."""
    threads = [threading.Thread(target=function) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANGS)
    assert not any(thread.is_alive() for thread in threads), "deadlock"


@contextlib.contextmanager
def another_thread(work: Callable[[threading.Event], object]) -> Iterator[None]:
    """Runs `work` on another thread. `work` must end soon after its event is set."""
    over = threading.Event()
    thread = threading.Thread(target=work, args=(over,))
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextlib.contextmanager
def another_thread_draws(allowed: Callable[[], object]) -> Iterator[list[torch.Tensor]]:
    """Another thread, outside of regions, draws random numbers each time `allowed` returns True.

    Yields the list of draws. Each draw uses all numbers of a Mersenne Twister's state.
    """
    draws = []

    def work(over: threading.Event) -> None:
        while allowed() and not over.is_set():
            draws.append(torch.randint(2**62, (312,)))

    with another_thread(work):
        yield draws


@contextlib.contextmanager
def another_thread_has(generator: torch.Generator) -> Iterator[None]:
    """Another thread often locks the generator and changes and restores its state."""

    def work(over: threading.Event) -> None:
        while not over.wait(1e-3):
            _testing.use_generator(generator, 1e-3)

    with another_thread(work):
        yield
