"""Offloading and paging. In: storages that leave memory. Out: when they leave, and for how long."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ebb._plan.profile.copies import Link, Pager
from ebb._plan.profile.profile import Value
from ebb._plan.simulate.changes import Changes, during

# See Note [Release in stream order].
_STRETCHES = 2  # ends of stretches after which the device waits for a copy
_STRETCH = 16  # values of a stretch; the end of a region ends a stretch, too
# Bytes of a pool's state, and of one number on the device. Each paged tensor has a ticket on the
# device that says where its rows are. A ticket has _TICKET numbers, and one more for each page.
_STATE, _NUMBER, _TICKET = 128, 8, 5


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
    """A storage is in memory from ``sent.allocated`` to ``left``, and from ``fetched`` to
    ``sent.ended``. Infinity: the copy still holds the storage when the step ends."""

    sent: Sent
    left: float
    fetched: float


class Transfers:
    """The copies of a step, in the order in which ebb makes them: out in the order of packing, back
    in reverse. See Note [The order of offloading].

    The end of a copy frees no memory in the prediction, since the host may be far ahead of the
    device. Memory is free once the device has waited for the copy: when two stretches of forward
    have ended, or a window of later bytes has been sent (Note [Release in stream order]). So the
    predicted memory is an upper bound.

    Args:
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
            more = []  # to prefetch: those sent before this one, the last first
            room = self._window - sum(early.size for early in ahead)
            for early in reversed(offloaded[: indices[sent]]):
                if left[early] < math.inf and early not in fetched:
                    room -= early.size
                    if room < 0:
                        break
                    more.append(early)
            ahead.update(more)
            for next_sent in (*wanted, *more):
                fetched[next_sent] = sent.needed
                done = max(done, now) + next_sent.size / self._link.back
                arrives[next_sent] = done
            waited += max(0.0, arrives.get(sent, now) - now)
        return fetched, waited


Kind = tuple[str, int]
"""Identifies storages that share a pool: their dtype, and the bytes of a row."""


@dataclass(frozen=True)
class Paged:
    """A storage that goes to a pool."""

    sent: Sent  # the storage's memory, and when it is needed
    value: Value  # its contents
    call: int  # index of its region

    @property
    def kind(self) -> Kind:
        """The kind of its pool."""
        return self.value.dtype, self.value.memory // self.value.rows

    @property
    def returns(self) -> float:
        """When its rows leave the pool."""
        return min(self.sent.needed, self.sent.ended)


@dataclass
class _Use:
    """Rows and pages of one pool: current and largest numbers."""

    pages: int = 0
    rows: int = 0  # rows in use if the pool is a stack
    most_pages: int = 0
    most_rows: int = 0
    stack: list[Paged] = field(default_factory=list)
    returned: set[Paged] = field(default_factory=set)


class Pools:
    """The pools of a step, sized and used as in the C++ code. See Note [How pools are sized]."""

    def __init__(self, all_paged: Iterable[Paged], pager: Pager) -> None:
        self._pager = pager
        order = sorted(all_paged, key=lambda paged: (paged.sent.packed, paged.sent.memory))
        begins = _first_of_calls(order, lambda sent: sent.packed)
        turning = _turning_points(order, begins) if pager.fixed_order else set()
        calls = sorted(begins, key=lambda call: begins[call])
        next_sends = {call: begins[after] for call, after in itertools.pairwise(calls)}

        def left(paged: Paged) -> float:
            if paged.call not in turning and not pager.beside:
                return paged.sent.packed
            return math.inf if paged.call in turning else next_sends.get(paged.call, math.inf)

        self.absences = [
            Absence(paged.sent, min(left(paged), paged.sent.needed), paged.sent.needed)
            for paged in order
        ]
        in_pools = [paged for paged in order if paged.call not in turning]
        uses = self._uses(in_pools)
        stacks = {
            kind for kind, use in uses.items() if use.most_rows <= use.most_pages * pager.page_rows
        }
        self.nbytes = sum(self._size(kind, use, kind in stacks) for kind, use in uses.items())
        self.are_too_large = self.nbytes > pager.limit
        tickets = []
        for paged in in_pools:
            pages = 0 if paged.kind in stacks else pager.pages(paged.value.rows)
            tickets += during(paged.sent.packed, paged.returns, _NUMBER * (_TICKET + pages))
        self.tickets = Changes(tickets)
        self.took = sum(pager.time_of(paged.value) for paged in in_pools)  # ms that copies take

    def _uses(self, in_pools: Sequence[Paged]) -> Mapping[Kind, _Use]:
        uses: dict[Kind, _Use] = defaultdict(_Use)
        comes = [(paged.sent.packed, True, index) for index, paged in enumerate(in_pools)]
        goes = [(paged.returns, False, index) for index, paged in enumerate(in_pools)]
        for _, comes_in, index in sorted([*comes, *goes]):
            paged = in_pools[index]
            use, rows = uses[paged.kind], paged.value.live_rows
            if comes_in:
                use.pages += self._pager.pages(rows)
                use.rows += rows
                use.stack.append(paged)
            else:
                use.pages -= self._pager.pages(rows)
                use.returned.add(paged)
                while use.stack and use.stack[-1] in use.returned:
                    use.rows -= use.stack.pop().value.live_rows
            use.most_pages = max(use.most_pages, use.pages)
            use.most_rows = max(use.most_rows, use.rows)
        return uses

    def _size(self, kind: Kind, use: _Use, is_stack: bool) -> int:
        needed = use.most_rows if is_stack else use.most_pages
        pages = -int(-needed * self._pager.headroom // 1)
        rows = pages if is_stack else pages * self._pager.page_rows
        return rows * kind[1] + _STATE + (0 if is_stack else _NUMBER * pages)


def _first_of_calls(order: Iterable[Paged], time: Callable[[Sent], float]) -> dict[int, float]:
    """For each call, the earliest `time` of its paged storages."""
    first: dict[int, float] = {}
    for paged in order:
        first[paged.call] = min(first.get(paged.call, math.inf), time(paged.sent))
    return first


def _turning_points(order: Sequence[Paged], begins: Mapping[int, float]) -> set[int]:
    """Calls whose backward follows directly after their forward."""
    needed = _first_of_calls(order, lambda sent: sent.needed)
    events = [(time, call) for times in (begins, needed) for call, time in times.items()]
    return {call for (_, call), (_, after) in itertools.pairwise(sorted(events)) if call == after}
