"""Timing several functions against each other in one process."""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias

import torch

Timed: TypeAlias = Callable[[], None]


@dataclass(frozen=True)
class Seconds:
    """The least and the median duration of one call, and of how many calls."""

    least: float
    median: float
    calls: int


@contextmanager
def steady_memory() -> Iterator[None]:
    """Keeps the garbage collector from running inside what is timed."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def once(function: Timed) -> float:
    """Seconds of one call; on a GPU until the device has finished."""
    start = time.perf_counter()
    function()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def interleaved(
    functions: Mapping[str, Timed],
    seconds: float,
    rounds: int = 5,
    before: Timed = lambda: None,
    measure: Callable[[Timed], float] = once,
) -> dict[str, Seconds]:
    """Times every function once in each round, in a new order, until the time is used up.

    In a new order, because who runs after a function that leaves cold caches or garbage behind
    would pay for it every time.

    Args:
        functions: what to time.
        seconds: for how long, all together, after the first calls that warm up.
        rounds: the least number of rounds, however long they take.
        before: called before each call, outside of what is timed.
        measure: calls a function and gives what it took.
    """
    order = list(functions.items())
    shuffle = random.Random(0).shuffle
    durations: dict[str, list[float]] = {name: [] for name in functions}
    for _, function in order:
        until = time.perf_counter() + min(0.3, seconds / len(order) / 3)
        for call in range(50):
            before()
            measure(function)
            if call > 1 and time.perf_counter() > until:
                break
    with steady_memory():
        until = time.perf_counter() + seconds
        done = 0
        while done < rounds or time.perf_counter() < until:
            shuffle(order)
            for name, function in order:
                before()
                durations[name].append(measure(function))
            done += 1
            if done % 10 == 0:
                gc.collect()  # the cycles that peers leave behind, but not while they are timed
    return {
        name: Seconds(min(values), statistics.median(values), len(values))
        for name, values in durations.items()
    }
