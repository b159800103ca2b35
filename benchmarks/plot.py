"""Plots time over held bytes of all systems, with the Pareto front. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from analysis import pareto_front
from report import MAIN

Row = dict[str, Any]

# Okabe and Ito's colours, which the colour-blind can tell apart.
COLOURS = {"torch-remat": "#CC79A7", "ebb": "#0072B2", "eager": "#000000"}
PEER = "#D55E00"
MARKERS = {
    "nothing recomputed": "*",
    "recompute all": "o",
    "recompute all but the last block": "P",
    "torchtitan": "s",
    "matmuls saved": "^",
    "everything saved": "D",
}


def colour(system: str) -> str:
    return next((c for prefix, c in COLOURS.items() if system.startswith(prefix)), PEER)


def draw_panel(axes: Any, rows: list[Row]) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

    eager = rows[0]
    points = [(100 * r["held_bytes"] / eager["held_bytes"], r["ratio"]) for r in rows]
    axes.set_title(eager["workload"], fontsize=10, loc="left")
    axes.set_yscale("log")
    low, high = min(y for _, y in points), max(y for _, y in points)
    margin = (high / low) ** 0.12
    axes.set_ylim(low / margin, high * margin)
    axes.set_xlim(-6, 150)
    axes.set_xticks([0, 25, 50, 75, 100])
    ticks = MaxNLocator(6, steps=[1, 2, 5, 10]).tick_values(low, high)
    axes.set_yticks([t for t in ticks if low / margin < t < high * margin])
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.grid(color="#E5E5E5", linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)

    front = pareto_front(points)
    axes.plot(*zip(*front, strict=True), color="#555555", linewidth=1.2, zorder=1)
    for row, (x, y) in zip(rows, points, strict=True):
        size = 70 if row["system"] == "eager" else 28
        marker = MARKERS[row["family"]]
        axes.scatter([x], [y], s=size, c=colour(row["system"]), marker=marker, zorder=3)
    label_points(axes, rows, points)


def label_points(axes: Any, rows: list[Row], points: list[tuple[float, float]]) -> None:
    """Writes each name right of its point, at the nearest height where it covers nothing."""
    to_axes = axes.transData + axes.transAxes.inverted()
    centres = [tuple(to_axes.transform(point)) for point in points]
    covered = [(x - 0.012, x + 0.012, y) for x, y in centres]  # left, right, height
    for row, (x, y) in sorted(zip(rows, centres, strict=True), key=lambda entry: entry[1]):
        name = row["system"]
        left = x + 0.02
        right = left + 0.0125 * len(name)
        offsets = sorted((step * 0.01 for step in range(-40, 41)), key=abs)
        height = next(y + offset for offset in offsets if free(covered, left, right, y + offset))
        covered.append((left, right, height))
        axes.annotate(
            name,
            xy=(x, y),
            xytext=(left, height),
            xycoords="axes fraction",
            textcoords="axes fraction",
            fontsize=7,
            va="center",
            color=colour(name),
            arrowprops={"arrowstyle": "-", "color": "#BBBBBB", "linewidth": 0.5},
        )


def free(covered: list[tuple[float, float, float]], left: float, right: float, y: float) -> bool:
    """True if a line of text covers nothing at height `y`. Units: fractions of the panel."""
    return 0 <= y <= 1 and not any(
        left < other_right and other_left < right and abs(y - height) < 0.034
        for other_left, other_right, height in covered
    )


def draw(rows: list[Row], path: Path) -> None:
    """Writes one panel for each of the main workloads that `rows` has.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "ebb"  # the same results give the same file
    from matplotlib import pyplot

    panels = [[row for row in rows if row["workload"] == name] for name in MAIN]
    panels = [panel for panel in panels if panel]
    if not panels:
        return
    across = min(2, len(panels))
    down = -(-len(panels) // across)
    figure, grid = pyplot.subplots(down, across, figsize=(5 * across, 3.9 * down), squeeze=False)
    for axes, panel in zip(grid.flat, panels, strict=False):
        draw_panel(axes, panel)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    for axes in grid[-1]:
        axes.set_xlabel("bytes held for backward, % of eager's", fontsize=9)
    for axes in grid[:, 0]:
        axes.set_ylabel("time of a step over eager's", fontsize=9)
    for axes in grid.flat:
        axes.tick_params(labelsize=8)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
