"""The cost of memory budgets, as a curve."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ebb._report.text import size


@dataclass(frozen=True)
class ParetoPoint:
    """Predicted memory and time for one budget.

    Attributes:
        budget: bytes that the step may allocate.
        peak: peak bytes that it will allocate.
        duration: milliseconds.
        replays: how many operators are recomputed.
    """

    budget: int
    peak: int
    duration: float
    replays: int


class Pareto(Sequence[ParetoPoint]):
    """Points from the lowest to the highest budget. ``str()`` gives a table.

    Attributes:
        plain_peak, plain_duration: peak and time of the step without regions.
    """

    def __init__(self, points: Sequence[ParetoPoint], peak: int, duration: float) -> None:
        self._points = tuple(points)
        self.plain_peak, self.plain_duration = peak, duration

    def __len__(self) -> int:
        return len(self._points)

    def __getitem__(self, index: Any) -> Any:
        return self._points[index]

    def __str__(self) -> str:
        lines = ["  budget        peak  of eager  time ms  of eager  replays"]
        for point in self._points:
            lines.append(
                f"{size(point.budget):>10}  {size(point.peak):>10}  "
                f"{point.peak / max(1, self.plain_peak):8.1%}  {point.duration:7.1f}  "
                f"{point.duration / self.plain_duration:8.3f}  {point.replays:7}"
            )
        return "\n".join(lines)
