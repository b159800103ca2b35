"""Plans as pictures, through matplotlib."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ebb._plan.pareto import Pareto, draw_pareto
from ebb._plan.profile import Profile
from ebb._support.figures import new_figure

Timeline = list[tuple[float, int]]
"""Bytes from each time on, in milliseconds."""


def draw(
    path: str | Path,
    predicted: Timeline,
    plain: Timeline,
    measured: Profile | None,
    pareto: Pareto,
) -> None:
    """What a step allocates over time, and what budgets cost."""
    figure = new_figure("a plot", 9, 8)
    memory, curve = figure.subplots(2, 1)
    _draw_memory(memory, {"plain eager, predicted": plain, "the plan, predicted": predicted})
    if measured is not None:
        _draw_memory(memory, {"the plan, measured": _timeline_of(measured)})
    memory.axhline(pareto.budget / 2**20, color="#c4642d", label="the plan's budget")
    memory.set_xlabel("share of the step's time")
    memory.set_ylabel("MiB allocated")
    memory.legend()
    draw_pareto(curve, pareto)
    figure.savefig(path, dpi=120)


_COLOURS = {
    "plain eager, predicted": "#999999",
    "the plan, predicted": "#2f6fb5",
    "the plan, measured": "#5b9f5b",
}


def _draw_memory(axes: Any, lines: dict[str, Timeline]) -> None:
    for name, line in lines.items():
        ended = [(time, size) for time, size in line if time < math.inf]
        ends = max((time for time, _ in ended), default=0.0) or 1.0
        shares = [time / ends for time, _ in ended]
        sizes = [size / 2**20 for _, size in ended]
        axes.step(shares, sizes, where="post", label=name, color=_COLOURS[name], linewidth=1)


def _timeline_of(profile: Profile) -> Timeline:
    sums: Iterable[int] = itertools.accumulate(taken for _, _, taken in profile.allocations)
    times = (time for time, _, _ in profile.allocations)
    return list(zip(times, sums, strict=True))
