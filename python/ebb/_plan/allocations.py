"""Allocations of a recorded step. In: a profile. Out: each block of memory, with its times."""

from __future__ import annotations

import bisect
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence

from ebb._plan.profile import Profile

Allocation = tuple[float, float, int]
"""When memory was allocated and freed, and its bytes."""


def _matched(events: Sequence[tuple[float, int]]) -> Iterable[Allocation]:
    """Match the allocations at one address with their frees."""
    begin, size = None, 0
    for time, change in events:
        if change > 0:
            begin, size = time, change
        elif begin is not None:
            yield begin, time, size
            begin = None
    if begin is not None:
        yield begin, math.inf, size


class Allocations:
    """The allocations of a step."""

    def __init__(self, profile: Profile) -> None:
        events: dict[int, list[tuple[float, int]]] = defaultdict(list)
        for time, address, size in profile.allocations:
            events[address].append((time, size))
        self.by_address = {address: list(_matched(of_one)) for address, of_one in events.items()}
        self.begins = sorted(  # time and bytes of each allocation
            (begin, size) for of_one in self.by_address.values() for begin, _, size in of_one
        )
        # frees of memory that was allocated before the step
        self.of_older = [of_one[0] for of_one in events.values() if of_one[0][1] < 0]
        self._replays = sorted((start, start + took) for _, start, took in profile.replays)

    def is_replay(self, time: float) -> bool:
        """True if a replay ran at this time."""
        index = bisect.bisect_right(self._replays, (time, math.inf)) - 1
        return index >= 0 and time <= self._replays[index][1]

    def find(self, address: int, time: float) -> Allocation | None:
        """The allocation of an address at a time."""
        of_one = self.by_address.get(address, [])
        index = bisect.bisect_right(of_one, (time, math.inf, 0)) - 1
        return of_one[index] if index >= 0 and of_one[index][1] >= time else None
