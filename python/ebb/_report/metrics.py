"""Counters of the last step and of the process, and numbers for a logger."""

from __future__ import annotations

import threading
from typing import Any

from ebb import _C
from ebb._report import planned

_MS = 1e-6  # milliseconds in a nanosecond


def stats() -> dict[str, Any]:
    """Return counters of the last step, by region and in total, and of objects alive now.

    A step begins when an outermost region is entered after a backward. After a backward the
    counters are thus those of the last forward and backward. For a logger, use
    :func:`ebb.metrics`.

    Returns:
        A dictionary with the keys ``"step"``, ``"regions"``, ``"total"``, ``"transfers"``,
        ``"demoted_ops"``, ``"live_recipes"``, ``"live_handles"``, ``"open_regions"``, and of the
        plug-ins that are built ``"ahead"``, ``"offload"`` and ``"paging"``.
        docs/reference/statistics.md explains each counter.

    Examples:
        >>> ebb.stats()["open_regions"]
        0
    """
    found = _C.stats()
    built = [name for name in ("ahead", "offload", "paging") if name in _C.plugins]
    return found | {name: getattr(_C, f"{name}_stats")() for name in built}


def reset_stats() -> None:
    """Set the counters of :func:`stats` to zero. Objects alive stay counted.

    Examples:
        >>> ebb.reset_stats()
        >>> ebb.stats()["regions"]
        {}
    """
    _C.reset_stats()
    planned.steps_are_renumbered()


class Metrics:
    """Measures the process from one call to the next. Several may exist at a time: each counts from
    its own calls."""

    def __init__(self) -> None:
        _C.time_replays()
        self._peak = _C.PeakWindow()
        self.begin()

    def begin(self) -> None:
        """Count from now on."""
        self._before = _C.totals()
        self._peak.begin()

    def read(self) -> dict[str, int | float]:
        """What has happened since the last call of this function or of `begin`."""
        _, peak, _ = self._peak.read()
        before = self._before
        self.begin()
        return _named(_found(self._before, before, peak))


def _named(found: dict[str, int | float]) -> dict[str, int | float]:
    return {f"ebb/{name}": value for name, value in found.items()}


def _found(now: dict[str, Any], before: dict[str, Any] | None, peak: int) -> dict[str, int | float]:
    found: dict[str, int | float] = {}
    if before is not None:
        found["peak_bytes"] = peak
    if now["counters"]["entered"]:
        found |= _counts(now, before)
    if (only := planned.only_plan()) is None:
        return found
    plan, age = only
    if age is not None:
        found["plan_age"] = age
    if plan.limit is not None:
        found["budget_bytes"] = plan.limit
    if before is not None and plan.plain.peak is not None and plan.predicted.peak is not None:
        found["eager_peak_bytes"] = peak + plan.plain.peak - plan.predicted.peak
    return found


def _counts(now: dict[str, Any], before: dict[str, Any] | None) -> dict[str, int | float]:
    if before is None:  # replays were not timed
        return {**now["counters"], "passes": now["passes"]}
    found = {name: value - before["counters"][name] for name, value in now["counters"].items()}
    found["passes"] = now["passes"] - before["passes"]
    for name in ("replay", "replay_ahead"):
        key = f"{name}_nanoseconds"
        found[f"{name}_ms"] = (now[key] - before[key]) * _MS
    return found


_lock = threading.Lock()  # guards `_own`
_own: Metrics | None = None  # what `metrics` reads; None before its first call


def metrics() -> dict[str, int | float]:
    """Return what ebb did since the last call, for a logger. Call it once per training step, after
    ``optimizer.step()``.

    The first call begins to measure peaks and times. It returns the counts since the process
    started, without peaks and times. Until then, metrics cost nothing.

    Returns:
        A flat dictionary such as ``{"ebb/peak_bytes": 1048576, "ebb/replay_ms": 1.5, ...}``, of
        this process alone. Unknown values are left out. docs/reference/statistics.md explains
        each.

    Examples:
        >>> _ = ebb.metrics()
        >>> ebb.metrics()["ebb/peak_bytes"] >= 0
        True
    """
    global _own
    with _lock:
        if _own is not None:
            return _own.read()
        found = _found(_C.totals(), None, 0)
        _own = Metrics()
    return _named(found)
