"""Replaces the host's times in a profile by the device's.

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

_LEAST = 1e-3  # device's share of the host's time in which no operator of a region runs


def on_device(profile: Profile) -> Profile:
    """The same profile, each of the host's times replaced by the device's.

    While an operator of a region runs, or a replay of one, the device's clock goes on by the time
    of its kernels. The rest of the step's duration goes to what the host did meanwhile, in
    proportion: backward, and forward outside of regions.
    """
    busy = _busy(profile)
    points = [0.0]  # of the host; ...
    took = [0.0]  # ... and of the device, between each and the one before; of busy ones kernels'
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
    """When the host began and ended with each operator and replay, and its kernels' time."""
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
