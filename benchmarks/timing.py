"""Timing several functions against each other in one process."""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import torch

Key = TypeVar("Key", bound=Hashable)
Trial: TypeAlias = Callable[[], Mapping[str, float]]  # seconds of each phase of one trial


@dataclass(frozen=True)
class Seconds:
    """The least and the median duration of a phase, and in how many trials it was measured."""

    least: float
    median: float
    trials: int


@contextmanager
def steady_memory() -> Iterator[None]:
    """Disables the garbage collector inside the with-block."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def interleaved(
    trials: Mapping[Key, Trial], seconds: float, rounds: int = 5
) -> dict[Key, dict[str, Seconds]]:
    """Runs every trial once in each round until the time is used up, after some warm-up runs.

    Each round has another order: in a fixed order, one trial would always run with the cold caches
    and garbage that its predecessor leaves.

    Args:
        trials: functions that return the durations of their phases.
        seconds: total time of the rounds, without warm-up.
        rounds: the lowest number of rounds, however long they take.
    """
    order = list(trials.items())
    shuffle = random.Random(0).shuffle
    durations: dict[Key, dict[str, list[float]]] = {key: {} for key in trials}
    for _, trial in order:
        until = time.perf_counter() + min(0.3, seconds / len(order) / 3)
        for run in range(50):
            trial()
            if run >= 1 and time.perf_counter() > until:
                break
    with steady_memory():
        until = time.perf_counter() + seconds
        done = 0
        while done < rounds or time.perf_counter() < until:
            shuffle(order)
            started = time.perf_counter()
            for key, trial in order:
                for phase, duration in trial().items():
                    durations[key].setdefault(phase, []).append(duration)
            done += 1
            # Other tools leave reference cycles, which are collected between rounds.
            if done % 10 == 0 or time.perf_counter() - started > 0.5:
                gc.collect()
    return {
        key: {
            phase: Seconds(min(values), statistics.median(values), len(values))
            for phase, values in phases.items()
        }
        for key, phases in durations.items()
    }


def time_step(step: Callable[[], None], device: torch.device) -> dict[str, float]:
    """Seconds of one training step.

    Returns:
        ``"step"``: duration of the step; on a GPU measured with events, after a synchronisation.
        On a GPU also ``"host"``: the time until the host has launched the last kernel.
    """
    if device.type != "cuda":
        start = time.perf_counter()
        step()
        return {"step": time.perf_counter() - start}
    torch.cuda.synchronize()
    begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    start = time.perf_counter()
    begin.record()
    step()
    end.record()
    host = time.perf_counter() - start
    end.synchronize()
    return {"step": begin.elapsed_time(end) / 1e3, "host": host}
