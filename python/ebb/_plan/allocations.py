"""When a recorded step allocated and freed memory."""

from __future__ import annotations

import bisect
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence

from ebb._plan.profile import Profile


def _spread(events: Sequence[tuple[float, int]]) -> Iterable[tuple[float, float, int]]:
    """Match the allocations at one address with their frees: start, end and size."""
    taken, size = None, 0
    for time, change in events:
        if change > 0:
            taken, size = time, change
        elif taken is not None:
            yield taken, time, size
            taken = None
    if taken is not None:
        yield taken, math.inf, size


class Allocations:
    """The allocations of a step, each as a stretch: start, end and bytes."""

    def __init__(self, profile: Profile) -> None:
        events: dict[int, list[tuple[float, int]]] = defaultdict(list)
        for time, address, taken in profile.allocations:
            events[address].append((time, taken))
        self._stretches = {address: list(_spread(found)) for address, found in events.items()}
        self.taken = sorted(  # time and bytes of each allocation
            (taken, size) for found in self._stretches.values() for taken, _, size in found
        )
        # frees of memory that was allocated before the step
        self.of_older = [found[0] for found in events.values() if found[0][1] < 0]
        self._replays = sorted((start, start + took) for _, start, took in profile.replays)

    def all(self) -> Iterable[tuple[int, list[tuple[float, float, int]]]]:
        return self._stretches.items()

    def is_replay(self, time: float) -> bool:
        """True if a replay ran at this time."""
        place = bisect.bisect_right(self._replays, (time, math.inf)) - 1
        return place >= 0 and time <= self._replays[place][1]

    def stretch(self, address: int, time: float) -> tuple[float, float, int] | None:
        """The stretch in which an address was allocated at a time."""
        stretches = self._stretches.get(address, [])
        place = bisect.bisect_right(stretches, (time, math.inf, 0)) - 1
        return stretches[place] if place >= 0 and stretches[place][1] >= time else None
