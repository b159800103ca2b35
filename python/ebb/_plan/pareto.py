"""The cost of memory budgets, as a curve."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ebb._report.text import size
from ebb._support.figures import new_figure


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
        budget: the plan's budget.
    """

    def __init__(
        self, points: Sequence[ParetoPoint], peak: int, duration: float, budget: int
    ) -> None:
        self._points = tuple(points)
        self.plain_peak, self.plain_duration, self.budget = peak, duration, budget

    def __len__(self) -> int:
        return len(self._points)

    def __getitem__(self, place: Any) -> Any:
        return self._points[place]

    def __str__(self) -> str:
        lines = ["  budget        peak  of plain     time  of plain  replays"]
        for one in self._points:
            lines.append(
                f"{size(one.budget):>10}  {size(one.peak):>10}  {one.peak / self._whole:8.1%}  "
                f"{one.duration:7.1f}  {one.duration / self.plain_duration:8.3f}  {one.replays:7}"
            )
        return "\n".join(lines)

    @property
    def _whole(self) -> int:
        return max(1, self.plain_peak)

    def to_csv(self, path: str | Path | None = None) -> str:
        """The table as CSV, in bytes and milliseconds.

        Args:
            path: also write the table to this file; None: return it only.

        Raises:
            OSError: the file cannot be written.
        """
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["budget", "peak", "duration", "replays"])
        writer.writerows(
            [one.budget, one.peak, f"{one.duration:.4f}", one.replays] for one in self._points
        )
        if path is not None:
            Path(path).write_text(text.getvalue(), encoding="utf-8")
        return text.getvalue()

    def plot(self, path: str | Path) -> None:
        """Draw time over peak memory, and the plan's budget as a line.

        Args:
            path: a ``.png``, ``.svg`` or ``.pdf`` file.

        Raises:
            ModuleNotFoundError: matplotlib is not installed.
            OSError: the file cannot be written.
        """
        figure = new_figure("a plot", 7, 4.5)
        draw_pareto(figure.subplots(), self)
        figure.savefig(path, dpi=120)


def draw_pareto(axes: Any, curve: Pareto) -> None:
    """Draw time over peak memory."""
    whole = max(1, curve.plain_peak)
    shares = [one.peak / whole for one in curve]
    times = [one.duration / curve.plain_duration for one in curve]
    axes.step(shares, times, where="post", marker="o", markersize=3, color="#2f6fb5")
    axes.plot([1.0], [1.0], "s", color="#444444", label="plain eager")
    axes.axvline(curve.budget / whole, color="#c4642d", label="the plan's budget")
    axes.set_xlabel("peak, of plain eager's")
    axes.set_ylabel("time, of plain eager's")
    axes.legend()
