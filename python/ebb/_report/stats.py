"""Counters of the last step and of the process."""

from __future__ import annotations

from typing import Any

from ebb import _C
from ebb._report import planned


def stats(flat: bool = False) -> dict[str, Any]:
    """Return counters of the last step, by region and in total, and of objects alive now.

    A step begins when an outermost region is entered after a backward. After a backward the
    counters are thus those of the last forward and backward.

    Args:
        flat: return one level of floats for a logger instead: the step, the totals, the sums of
            transfers, and the objects alive, as ``{"ebb/bytes_saved": 1024.0, ...}``.

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
    if flat:
        return _flat(found)
    built = [name for name in ("ahead", "offload", "paging") if name in _C.plugins]
    return found | {name: getattr(_C, f"{name}_stats")() for name in built}


def _flat(found: dict[str, Any]) -> dict[str, float]:
    numbers = dict(found["total"])
    for operators in found["transfers"].values():
        for transfers in operators.values():
            for name in ("bytes_reloaded", "bytes_waited_host", "bytes_waited_device"):
                numbers[name] = numbers.get(name, 0) + transfers[name]
    for name in ("step", "live_recipes", "live_handles", "open_regions"):
        numbers[name] = found[name]
    return {f"ebb/{name}": float(number) for name, number in numbers.items()}


def reset_stats() -> None:
    """Set the counters of :func:`stats` to zero. Objects alive stay counted."""
    _C.reset_stats()
    planned.steps_are_renumbered()
