"""Work on other threads, at the same time as a test."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch

from ebb import _testing

Result = TypeVar("Result")


def in_thread(function: Callable[[], Result]) -> Result:
    result = []
    thread = threading.Thread(target=lambda: result.append(function()))
    thread.start()
    thread.join()
    return result[0]


@contextlib.contextmanager
def another_thread(work: Callable[[threading.Event], object]) -> Iterator[None]:
    """Inside. It ends soon after what it is given has been set."""
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
    """Outside of regions, whenever `allowed` returns; yields the list of its draws. Each takes as
    many numbers as the state of a Mersenne Twister has.
    """
    draws = []

    def work(over: threading.Event) -> None:
        while allowed() and not over.is_set():
            draws.append(torch.randint(2**62, (312,)))

    with another_thread(work):
        yield draws


@contextlib.contextmanager
def another_thread_has(generator: torch.Generator) -> Iterator[None]:
    """Now and then, under its lock, as kernels that draw; and leaves it as it was."""

    def work(over: threading.Event) -> None:
        while not over.wait(1e-3):
            _testing.use_generator(generator, 1e-3)

    with another_thread(work):
        yield
