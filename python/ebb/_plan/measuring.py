"""Measuring a step that a program can run: plain, with all kept, and with all recomputed."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

from ebb import ahead
from ebb._plan.measured import Measured, base_bytes
from ebb._plan.profile import profile, wait_for_devices
from ebb._region.apply import apply
from ebb.policies import recompute_all, save_all

_ROUNDS = 3


def measure(step: Callable[[], object], model: torch.nn.Module, modules: Sequence[str]) -> Measured:
    """Run a step some twenty times, with and without regions.

    Args:
        step: runs a forward of the model and its backward.
        model: as in :func:`ebb.plan`.
        modules: globs of those that become regions.

    Raises:
        ValueError, RuntimeError: as :func:`ebb.apply` and :func:`ebb.profile`.
    """
    regions = ahead.settings()["regions"]
    ahead.configure(regions=0)  # what a replay takes is measured, not what is left to be seen
    try:
        return _measure(step, model, modules)
    finally:
        ahead.configure(regions=regions)


def _measure(
    step: Callable[[], object], model: torch.nn.Module, modules: Sequence[str]
) -> Measured:
    with apply(model, save_all, modules):
        kept = profile(step, steps=2)
    with apply(model, recompute_all, modules):
        dropped = profile(step, steps=2)
    plain = profile(step, steps=1)
    times: dict[str, list[float]] = {"plain": [], "kept": [], "dropped": []}
    for _ in range(_ROUNDS):
        times["plain"].append(_timed(step))
        with apply(model, save_all, modules):
            times["kept"].append(_timed(step))
        with apply(model, recompute_all, modules):
            times["dropped"].append(_timed(step))
    took = {name: statistics.median(found) for name, found in times.items()}
    return Measured(
        plain=took["plain"],
        plain_peak=plain.peak,
        kept=kept,
        kept_duration=took["kept"],
        dropped=dropped,
        dropped_duration=took["dropped"],
        base=base_bytes([model]),
    )


def _timed(step: Callable[[], object]) -> float:
    wait_for_devices()
    begin = time.perf_counter()
    step()
    wait_for_devices()
    return (time.perf_counter() - begin) * 1e3
