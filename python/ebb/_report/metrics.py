"""Counters of the last forward and backward and of the process, and numbers for a logger."""

from __future__ import annotations

import threading
from typing import Any

from ebb import _C
from ebb._report import planned

_MS = 1e-6  # milliseconds in a nanosecond


def stats() -> dict[str, Any]:
    """Return counters of the last forward and backward, by region and in total, and of objects
    alive now. A forward and backward begins when an outermost region is entered after a backward.
    For a logger, use ``ebb.metrics``.

    Returns:
        A dictionary with the keys ``"passes"``, ``"regions"``, ``"total"``, ``"transfers"``,
        ``"demoted_ops"``, ``"live_recipes"``, ``"live_handles"``, ``"open_regions"``, and of the
        plug-ins that are built ``"ahead"``, ``"offload"`` and ``"paging"``.
        docs/reference/fields.md explains each counter.

    Examples:
        >>> ebb.stats()["open_regions"]
        0
    """
    found = _C.stats()
    built = [name for name in ("ahead", "offload", "paging") if name in _C.plugins]
    return found | {name: getattr(_C, f"{name}_stats")() for name in built}


def reset_stats() -> None:
    """Set the counters of ``stats`` to zero. Objects alive stay counted.

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
        now = self._before
        counts: dict[str, int | float] = {}
        if _has_counts(now):
            counts = {
                name: value - before["counters"][name] for name, value in now["counters"].items()
            }
            counts["passes"] = now["passes"] - before["passes"]
            for name in ("replay", "replay_ahead"):
                key = f"{name}_nanoseconds"
                counts[f"{name}_ms"] = (now[key] - before[key]) * _MS
        return _found(counts, peak)


def _has_counts(totals: dict[str, Any]) -> bool:
    """False in a program without regions. Under EBB_DISABLE, one with regions gets zeros."""
    return bool(totals["counters"]["entered"]) or _C.are_disabled_everywhere()


def _found(counts: dict[str, int | float], peak: int | None) -> dict[str, int | float]:
    """The counts and the figures of the plan, if there is one, for a logger."""
    found: dict[str, int | float | None] = {"peak_bytes": peak, **counts}
    if (only := planned.only_plan()) is not None:
        plan, age = only
        found |= {"plan_age": age, "budget_bytes": plan.limit}
        eager, predicted = plan.plain.peak, plan.predicted.peak
        if peak is not None and eager is not None and predicted is not None:
            found["eager_peak_bytes"] = peak + eager - predicted
    return {f"ebb/{name}": value for name, value in found.items() if value is not None}


_lock = threading.Lock()  # guards `_own`
_own: Metrics | None = None  # what `metrics` reads; None before its first call


def metrics() -> dict[str, int | float]:
    """Return what ebb did since the last call, for a logger. Call it once per training step, after
    ``optimizer.step()``.

    The first call begins to measure peaks and times. It returns the counts since the process
    started, without peaks and times. Until then, metrics cost nothing.

    Returns:
        A flat dictionary such as ``{"ebb/peak_bytes": 1048576, "ebb/replay_ms": 1.5, ...}``, of
        this process alone. Unknown values are left out. docs/reference/fields.md explains
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
        now = _C.totals()
        _own = Metrics()
    counts = {**now["counters"], "passes": now["passes"]} if _has_counts(now) else {}
    return _found(counts, None)
