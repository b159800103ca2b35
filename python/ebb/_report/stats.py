"""Counters of the last step and of the process."""

from __future__ import annotations

from typing import Any

from ebb import _C
from ebb._report import planned


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
