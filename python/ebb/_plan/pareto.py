"""The cost of memory budgets, as a curve."""

from __future__ import annotations

import csv
import importlib
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
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
        budget: the plan's budget.
    """

    def __init__(
        self, points: Sequence[ParetoPoint], peak: int, duration: float, budget: int
    ) -> None:
        self._points = tuple(points)
        self.plain_peak, self.plain_duration, self.budget = peak, duration, budget

    def __len__(self) -> int:
        return len(self._points)

    def __getitem__(self, index: Any) -> Any:
        return self._points[index]

    def __str__(self) -> str:
        lines = ["  budget        peak  of eager  time ms  of eager  replays"]
        for point, (peak, time) in zip(self._points, self._shares(), strict=True):
            lines.append(
                f"{size(point.budget):>10}  {size(point.peak):>10}  {peak:8.1%}  "
                f"{point.duration:7.1f}  {time:8.3f}  {point.replays:7}"
            )
        return "\n".join(lines)

    def _shares(self) -> list[tuple[float, float]]:
        """Each point's peak and time, as shares of those without regions."""
        whole = max(1, self.plain_peak)
        return [(point.peak / whole, point.duration / self.plain_duration) for point in self]

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
            [point.budget, point.peak, f"{point.duration:.4f}", point.replays] for point in self
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
        try:
            figures: Any = importlib.import_module("matplotlib.figure")
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "ebb: a plot needs matplotlib; pip install 'torch-ebb[plot]'"
            ) from error
        figure = figures.Figure(figsize=(7, 4.5), layout="constrained")
        axes = figure.subplots()
        peaks, times = zip(*self._shares(), strict=True)
        axes.step(peaks, times, where="post", marker="o", markersize=3, color="#2f6fb5")
        axes.plot([1.0], [1.0], "s", color="#444444", label="eager")
        budget = self.budget / max(1, self.plain_peak)
        axes.axvline(budget, color="#c4642d", label="the plan's budget")
        axes.set_xlabel("peak memory relative to eager")
        axes.set_ylabel("step time relative to eager")
        axes.legend()
        figure.savefig(path, dpi=120)
