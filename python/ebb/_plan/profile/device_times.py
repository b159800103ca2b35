"""Device times. In: a profile with host times. Out: the same profile with device times.

On an accelerator, the host launches the kernels of a step's forward long before the device has run
them. The host's times have the right order but lie too close together, so the simulator would find
too little time in which copies can hide.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from itertools import accumulate
from statistics import fmean
from typing import Any, cast

from ebb._plan.profile.profile import Profile

_TIMES = ("made", "let_go", "asked", "again", "ended")  # attributes of a value that are times
_LEAST = 1e-3  # minimum ratio of device time to host time while no operator of a region runs
_BUSY = 0.8  # with a smaller ratio of kernel time to host time in replays, the device waits


def on_device(profile: Profile) -> Profile:
    """The same profile with device times.

    While a region's operator or a replay of it runs, the device's clock advances by the time of its
    kernels. If the host takes longer for the replays than their kernels, because the kernels are
    small, the device waits for the host, and a replay takes the host's time. The rest of the step's
    duration belongs to backward, and to forward outside of regions. It is divided among the host's
    intervals between those operators, in proportion to their length.
    """
    busy = _busy(profile)
    points = [0.0]  # host times
    took = [0.0]  # device time from the point before; -1: a share of the remaining time
    for start, end, kernels in busy:
        start = max(start, points[-1])
        points += [start, max(start, end)]
        took += [-1.0, max(kernels, _LEAST * (points[-1] - start))]
    points.append(max([points[-1], *(time for time, _, _ in profile.allocations)]))
    took.append(-1.0)
    idle = [here - before for before, here in zip([0.0, *points], points, strict=False)]
    without = sum(gap for gap, kernels in zip(idle, took, strict=True) if kernels < 0)
    left = profile.duration - sum(kernels for kernels in took if kernels > 0)
    share = max(_LEAST, left / without) if without > 0 else 1.0
    each = (
        gap * share if kernels < 0 else kernels for gap, kernels in zip(idle, took, strict=True)
    )
    times = list(accumulate(each))

    def there(time: float) -> float:
        if time < 0:  # never
            return time
        index = bisect.bisect_right(points, time) - 1
        if index + 1 == len(points):
            return max(profile.duration, times[-1]) if time > points[-1] else times[-1]
        share = (time - points[index]) / (points[index + 1] - points[index])
        return times[index] + share * (times[index + 1] - times[index])

    return replace(
        profile,
        duration=max(profile.duration, times[-1]),
        operators=tuple(
            replace(operator, start=there(operator.start)) for operator in profile.operators
        ),
        replays=tuple(
            (name, there(start), there(start + runtime) - there(start))
            for name, start, runtime in profile.replays
        ),
        values=tuple(
            replace(value, **{name: cast(Any, there(getattr(value, name))) for name in _TIMES})
            for value in profile.values
        ),
        allocations=tuple((there(time), at, size) for time, at, size in profile.allocations),
    )


def _busy(profile: Profile) -> Iterable[tuple[float, float, float]]:
    """Host start, host end and device time of each operator and replay."""
    busy = []
    runtimes: dict[str, list[float]] = defaultdict(list)
    for operator in profile.operators:
        made = (profile.values[value].made for value in operator.outputs)
        busy.append((operator.start, max([operator.start, *made]), operator.runtime))
        runtimes[operator.func_name].append(operator.runtime)
    kernels = [
        fmean(runtimes[name]) if name in runtimes else runtime
        for name, _, runtime in profile.replays
    ]
    waits = sum(kernels) < _BUSY * sum(runtime for *_, runtime in profile.replays)
    for (_, start, runtime), took in zip(profile.replays, kernels, strict=True):
        busy.append((start, start + runtime, max(took, runtime) if waits else took))
    return sorted(busy)
