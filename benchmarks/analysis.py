"""Fits a line to measurements, and finds the Pareto front of systems."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Line:
    """y = slope * x + intercept, by least squares.

    Attributes:
        slope: the increase of y per unit of x.
        intercept: y at x = 0.
        residual: an error estimate of the slope: the largest distance between a measured y and the
            line, divided by the range of the xs.
    """

    slope: float
    intercept: float
    residual: float


def fit_line(xs: Sequence[float], ys: Sequence[float]) -> Line:
    """The least-squares line through the points.

    Raises:
        ValueError: there are fewer than two different xs.
    """
    if len(xs) != len(ys) or len(set(xs)) < 2:
        raise ValueError(f"a line needs two different xs and as many ys; got {xs} and {ys}")
    x_mean, y_mean = sum(xs) / len(xs), sum(ys) / len(ys)
    spread = sum((x - x_mean) ** 2 for x in xs)
    slope = sum((x - x_mean) * (y - y_mean) for x, y in zip(xs, ys, strict=True)) / spread
    intercept = y_mean - slope * x_mean
    distance = max(abs(y - slope * x - intercept) for x, y in zip(xs, ys, strict=True))
    return Line(slope, intercept, distance / (max(xs) - min(xs)))


def pareto_front(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points that no other point beats in both coordinates, sorted by x; less is better."""
    front: list[tuple[float, float]] = []
    for point in sorted(set(points)):
        if not front or point[1] < front[-1][1]:
            front.append(point)
    return front
