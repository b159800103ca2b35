"""Reports as pictures, through matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ebb._report.step import Step
from ebb._report.text import headline, size
from ebb._support.figures import new_figure

_BARS = 15
_COLOURS = {
    "saved": "#2f6fb5",
    "kept": "#c4642d",
    "recomputed": "#5b9f5b",
    "offloaded": "#8a67b5",
    "paged": "#3f9a9a",
    "escaped": "#c9a227",
    "copied": "#b5476b",
}


def plot(report: Step, path: Path) -> None:
    figure = new_figure("a report as .png", 11, 9)
    figure.suptitle(f"ebb, {headline(report)}")
    curves, bars = figure.subplots(2, 1)
    _draw_timeline(curves, report)
    _draw_bars(bars, report)
    figure.savefig(path, dpi=120)


def _draw_timeline(axes: Any, report: Step) -> None:
    milliseconds = [point[0] * 1e3 for point in report.timeline]
    for place, label, colour in ((2, "plain eager", "#999999"), (1, "with ebb", "#2f6fb5")):
        mebibytes = [point[place] / 2**20 for point in report.timeline]
        axes.fill_between(milliseconds, mebibytes, step="post", color=colour, alpha=0.25)
        axes.step(milliseconds, mebibytes, where="post", color=colour, label=label)
    axes.set_xlabel("ms since the step began")
    axes.set_ylabel("MiB held for backward")
    axes.set_ylim(bottom=0)
    axes.legend(loc="upper right")


def _draw_bars(axes: Any, report: Step) -> None:
    by_op: dict[str, dict[str, int]] = {}
    for row in report.rows:
        if row.fate in _COLOURS:
            name = row.op.removeprefix("aten::").removesuffix(".default")
            ops = by_op.setdefault(name if len(name) <= 28 else name[:27] + "…", {})
            ops[row.fate] = ops.get(row.fate, 0) + row.bytes
    largest = sorted(by_op, key=lambda op: -sum(by_op[op].values()))[:_BARS][::-1]
    left = [0.0] * len(largest)
    for fate, colour in _COLOURS.items():
        widths = [by_op[op].get(fate, 0) / 2**20 for op in largest]
        if any(widths):
            axes.barh(largest, widths, left=left, color=colour, label=fate)
            left = [a + b for a, b in zip(left, widths, strict=True)]
    for place, op in enumerate(largest):
        axes.text(left[place], place, f" {size(sum(by_op[op].values()))}", va="center", fontsize=8)
    axes.set_xlabel("MiB of storages that the operator made, and what became of them")
    if largest:
        axes.set_xlim(right=1.12 * max(left))
        axes.legend(loc="lower right")
