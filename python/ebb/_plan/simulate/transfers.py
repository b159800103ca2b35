"""Offloading. In: storages to offload, and a `Link`. Out: their copies and waiting time."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ebb._plan.profile.link import Link

# See Note [Release in stream order].
_STRETCHES = 2  # ends of stretches after which the device waits for a copy
_STRETCH = 16  # values of a stretch; the end of a region ends a stretch, too


@dataclass(frozen=True)
class Sent:
    """A storage that leaves memory."""

    memory: int  # its index in Step.memories
    size: int
    allocated: float  # when its memory was allocated
    packed: float  # when it may leave
    needed: float  # when it must be back in memory
    ended: float  # when nothing needs it any more


@dataclass(frozen=True)
class Absence:
    """A storage is in memory from ``sent.allocated`` to ``left``, and again from ``fetched`` to
    ``sent.ended``. Infinity: the copy still holds the storage when the step ends."""

    sent: Sent
    left: float
    fetched: float


class Transfers:
    """The copies of a step, in the order in which ebb makes them: out in the order of packing, back
    in reverse. See Note [The order of offloading].

    In the prediction, the end of a copy frees no memory, since the host may be far ahead of the
    device. Memory is free once the device has waited for the copy: when two stretches of forward
    have ended, or a window of later bytes has been sent (Note [Release in stream order]). Until
    then the copy holds the memory, even if backward needs the storage no more. So the predicted
    memory is an upper bound.

    Args:
        all_sent: what the regions send.
        window: bytes that may be in flight, and bytes that may be fetched before backward needs
            them.
        ends: when each region ends.
    """

    def __init__(
        self, all_sent: Iterable[Sent], link: Link, window: int, ends: Iterable[float] = ()
    ) -> None:
        self._link, self._window = link, window
        self._ends = [] if link.is_disk else sorted(ends)
        order = sorted(all_sent, key=lambda sent: (sent.packed, sent.memory))
        offloaded, left, waited_out = self._send(order)
        fetched, waited_back = self._fetch(offloaded, left)
        self.absences = [
            Absence(sent, left[sent], fetched.get(sent, sent.needed)) for sent in order
        ]
        self.waited = waited_out + waited_back  # milliseconds that the step waits for copies
        self.moved = sum(sent.size for sent in offloaded)

    def _send(self, order: Sequence[Sent]) -> tuple[list[Sent], dict[Sent, float], float]:
        """Storages that are offloaded, when each storage has left, and how long the host waits."""
        offloaded: list[Sent] = []
        left = {sent: sent.ended for sent in order}
        in_flight: deque[tuple[Sent, float, int]] = deque()  # with a copy's end, and its stretch
        used = flying = stretch = in_stretch = 0
        done = waited = 0.0
        ends = deque(self._ends)

        def release(now: float) -> None:
            nonlocal flying, waited
            first, its_end, _ = in_flight.popleft()
            flying -= first.size
            waited += max(0.0, its_end - (now + waited))
            left[first] = now

        def end_stretch(now: float) -> None:
            nonlocal stretch, in_stretch
            if in_stretch:
                stretch, in_stretch = stretch + 1, 0
                while in_flight and stretch - in_flight[0][2] >= _STRETCHES:
                    release(now)

        for sent in order:
            while ends and ends[0] < sent.packed:
                end_stretch(ends.popleft())
            if used + sent.size > self._link.room:
                continue  # no room on the host: the storage stays
            used += sent.size
            offloaded.append(sent)
            left[sent] = math.inf
            done = max(done, sent.packed + waited) + sent.size / self._link.out
            in_flight.append((sent, done, stretch))
            flying += sent.size
            while flying > self._window:
                release(sent.packed)
            in_stretch += 1
            if in_stretch == _STRETCH:
                end_stretch(sent.packed)
        for end in ends:
            end_stretch(end)
        return offloaded, left, waited

    def _fetch(
        self, offloaded: Sequence[Sent], left: Mapping[Sent, float]
    ) -> tuple[dict[Sent, float], float]:
        """When each offloaded storage comes back, and how long the device waits for copies."""
        fetched: dict[Sent, float] = {}
        arrives: dict[Sent, float] = {}
        ahead: set[Sent] = set()
        done = waited = 0.0
        indices = {sent: index for index, sent in enumerate(offloaded)}
        for sent in sorted(offloaded, key=lambda sent: sent.needed):
            ahead.discard(sent)
            now = sent.needed + waited
            wanted = [sent] if left[sent] < math.inf and sent not in fetched else []
            more = self._ahead_of(
                offloaded[: indices[sent]],
                left,
                {*fetched, *wanted},
                sum(early.size for early in ahead),
            )
            ahead.update(more)
            for next_sent in (*wanted, *more):
                fetched[next_sent] = sent.needed
                done = max(done, now) + next_sent.size / self._link.back
                arrives[next_sent] = done
            waited += max(0.0, arrives.get(sent, now) - now)
        return fetched, waited

    def _ahead_of(
        self,
        earlier: Sequence[Sent],
        left: Mapping[Sent, float],
        fetched: Container[Sent],
        ahead: int,
    ) -> list[Sent]:
        """Storages to prefetch when one is unpacked: those sent before it, the last first."""
        more = []
        for sent in reversed(earlier):
            if left[sent] < math.inf and sent not in fetched:
                ahead += sent.size
                if ahead > self._window:
                    break
                more.append(sent)
        return more
