"""Plots time over peak memory of plans and other tools. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from planner_curves import AHEAD, EAGER, PLANS
from planner_peers import COMPILED, DTR, EVERY, FIRST, KNAPSACK, SAC, SEGMENTS

Row = dict[str, Any]

# Okabe and Ito's colours, which the colour-blind can tell apart: colour and marker of a family.
STYLES = {
    PLANS: ("#0072B2", "o"),
    AHEAD: ("#009E73", "P"),
    EVERY: ("#D55E00", "s"),
    FIRST: ("#D55E00", "v"),
    SEGMENTS: ("#D55E00", "x"),
    SAC: ("#CC79A7", "^"),
    KNAPSACK: ("#E69F00", "D"),
    COMPILED: ("#56B4E9", "h"),
    EAGER: ("#000000", "*"),
}


def draw(rows: list[Row], path: Path) -> None:
    """
    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "ebb"  # the same results give the same file
    from matplotlib import pyplot

    if not rows:
        return
    figure, axes = pyplot.subplots(figsize=(7.5, 4.6))
    for family, (colour, marker) in STYLES.items():
        points = sorted((100 * r["share"], r["ratio"]) for r in rows if r["family"] == family)
        if not points:
            continue
        is_curve = family in (PLANS, AHEAD)
        size = 90 if family == EAGER else 26
        xs, ys = zip(*points, strict=True)
        if is_curve:
            axes.plot(xs, ys, color=colour, linewidth=1.4, zorder=3)
        axes.scatter(xs, ys, s=size, c=colour, marker=marker, label=family, zorder=4)
    axes.plot(
        *zip(*((100 * share, time) for share, time in DTR), strict=True),
        color="#999999",
        linestyle=":",
        marker=".",
        label="DTR, as published (GPU, another transformer)",
    )
    axes.set_ylim(0.97, 1.02 * max([1.62, *(row["ratio"] for row in rows)]))
    axes.set_xlim(0, 104)
    axes.set_xlabel("peak of what a step allocates, % of eager's", fontsize=9)
    axes.set_ylabel("time of a step over eager's", fontsize=9)
    axes.tick_params(labelsize=8)
    axes.grid(color="#E5E5E5", linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.legend(fontsize=7.5, frameon=False)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
