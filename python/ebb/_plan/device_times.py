"""Replaces host times in a profile by device times.

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

from ebb._plan.profile import Profile

_LEAST = 1e-3  # minimum of device time per host time while no operator of a region runs


def on_device(profile: Profile) -> Profile:
    """The same profile with device times instead of host times.

    While a region's operator or a replay of it runs, the device's clock advances by the time of its
    kernels. The rest of the step's duration is divided among the other host times in proportion:
    backward, and forward outside of regions.
    """
    busy = _busy(profile)
    points = [0.0]  # host times
    took = [0.0]  # device time since the point before; -1: to be divided in proportion
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
        place = bisect.bisect_right(points, time) - 1
        if place + 1 == len(points):
            return max(profile.duration, times[-1]) if time > points[-1] else times[-1]
        share = (time - points[place]) / (points[place + 1] - points[place])
        return times[place] + share * (times[place + 1] - times[place])

    return replace(
        profile,
        duration=max(profile.duration, times[-1]),
        operators=tuple(replace(one, start=there(one.start)) for one in profile.operators),
        replays=tuple(
            (name, there(start), there(start + runtime) - there(start))
            for name, start, runtime in profile.replays
        ),
        values=tuple(
            replace(
                one,
                made=there(one.made),
                let_go=there(one.let_go),
                asked=there(one.asked),
                again=there(one.again),
                ended=there(one.ended),
            )
            for one in profile.values
        ),
        allocations=tuple((there(time), at, taken) for time, at, taken in profile.allocations),
    )


def _busy(profile: Profile) -> Iterable[tuple[float, float, float]]:
    """Host start, host end and kernel time of each operator and replay."""
    found = []
    runtimes: dict[str, list[float]] = defaultdict(list)
    for one in profile.operators:
        made = (profile.values[value].made for value in one.outputs)
        found.append((one.start, max([one.start, *made]), one.runtime))
        runtimes[one.func_name].append(one.runtime)
    for name, start, runtime in profile.replays:
        kernels = fmean(runtimes[name]) if name in runtimes else runtime
        found.append((start, start + runtime, kernels))
    return sorted(found)
