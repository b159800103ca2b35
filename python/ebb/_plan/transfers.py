"""Models offloading between forward and backward: copies, memory and waiting time."""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Link:
    """Speed and limits of offloading.

    Attributes:
        out, back: bytes per millisecond in each direction.
        least: smaller storages are not offloaded.
        room: bytes that may be offloaded at a time.
    """

    out: float
    back: float
    least: int
    room: int


NO_LINK = Link(1.0, 1.0, sys.maxsize, 0)
"""A link over which nothing is offloaded."""


@dataclass(frozen=True)
class Sent:
    """A storage that is offloaded.

    Attributes:
        memory: its index in ``Step.memories``.
        size: in bytes.
        taken: when its memory was allocated.
        packed: when it may be offloaded.
        asked: when it must be back in memory.
        ended: when nothing needs it any more.
    """

    memory: int
    size: int
    taken: float
    packed: float
    asked: float
    ended: float


@dataclass(frozen=True)
class Stays:
    """A storage is in memory from ``sent.taken`` to ``left``, and again from ``fetched`` on."""

    sent: Sent
    left: float
    fetched: float


class Transfers:
    """The copies of a step, in the order in which ebb makes them: out in the order of packing, back
    in reverse. See Note [The order of offloading].

    The model does not use the time at which a copy ends, since the host may be far ahead of the
    device. Memory counts as free once the host has waited for the copy, which happens when a window
    of later bytes has been sent. So the predicted memory is an upper bound.

    Attributes:
        stays: when each storage is in memory.
        waited: milliseconds that the step waits for copies.
        moved: bytes that are offloaded.

    Args:
        all_sent: storages to offload.
        link: speed and limits.
        window: bytes that may be in flight, and bytes that may be fetched before backward needs
            them.
    """

    def __init__(self, all_sent: Iterable[Sent], link: Link, window: int) -> None:
        self._link, self._window = link, window
        order = sorted(all_sent, key=lambda one: (one.packed, one.memory))
        gone, left, waited_out = self._send(order)
        fetched, waited_back = self._fetch(gone, left)
        self.stays = [
            Stays(one, left.get(one, math.inf), fetched.get(one, one.asked)) for one in order
        ]
        self.waited = waited_out + waited_back
        self.moved = sum(one.size for one in gone)

    def _send(self, order: Sequence[Sent]) -> tuple[list[Sent], dict[Sent, float], float]:
        """Storages that are offloaded, when each has left, and how long the host waits."""
        gone: list[Sent] = []
        left: dict[Sent, float] = {}
        under_way: deque[tuple[Sent, float]] = deque()  # with the end of the copy
        used = flying = 0
        done = waited = 0.0
        for one in order:
            if used + one.size > self._link.room:
                continue  # no room on the host: the storage stays
            used += one.size
            gone.append(one)
            done = max(done, one.packed + waited) + one.size / self._link.out
            under_way.append((one, done))
            flying += one.size
            while flying > self._window:
                first, its_end = under_way.popleft()
                flying -= first.size
                waited += max(0.0, its_end - (one.packed + waited))
                left[first] = one.packed
        return gone, left, waited

    def _fetch(
        self, gone: Sequence[Sent], left: dict[Sent, float]
    ) -> tuple[dict[Sent, float], float]:
        """When each offloaded storage comes back, and how long the device waits for copies."""
        fetched: dict[Sent, float] = {}
        arrives: dict[Sent, float] = {}
        ahead: set[Sent] = set()
        done = waited = 0.0
        places = {one: place for place, one in enumerate(gone)}
        for one in sorted(gone, key=lambda one: one.asked):
            ahead.discard(one)
            now = one.asked + waited
            wanted = [one] if one in left and one not in fetched else []
            there = {*fetched, *wanted}
            more = self._ahead_of(places[one], gone, left, there, sum(e.size for e in ahead))
            ahead.update(more)
            for other in (*wanted, *more):
                fetched[other] = one.asked
                done = max(done, now) + other.size / self._link.back
                arrives[other] = done
            waited += max(0.0, arrives.get(one, now) - now)
        return fetched, waited

    def _ahead_of(
        self,
        place: int,
        gone: Sequence[Sent],
        left: Container[Sent],
        there: Container[Sent],
        ahead: int,
    ) -> list[Sent]:
        """Storages to prefetch when one is unpacked: those sent before it, the last first."""
        found = []
        for one in reversed(gone[:place]):
            if one in left and one not in there:
                ahead += one.size
                if ahead > self._window:
                    break
                found.append(one)
        return found
