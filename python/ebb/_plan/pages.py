"""Models paging between forward and backward: pool sizes, copies and their time."""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ebb import _C
from ebb._plan.changes import Changes
from ebb._plan.profile import Profile, Value
from ebb._plan.transfers import Sent, Stays
from ebb._support import devices
from ebb.paging import configure, reset
from ebb.paging._mark_rows import marks
from ebb.paging._run_step import runs

_PROBE = 4 * 2**20  # bytes of one timed copy
_ROUNDS = 5
_EACH = 0.01  # host milliseconds for one storage, out and back
_STATE, _NUMBER, _TICKET = 128, 8, 5  # bytes: of a pool, of a page number; numbers in a ticket

Kind = tuple[str, int]
"""Identifies storages that share a pool: their dtype, and the bytes of a row."""


@dataclass(frozen=True)
class Pager:
    """Settings and speed of paging.

    Attributes:
        speed: bytes that one copy moves in a millisecond.
        page_rows, headroom: as in :func:`ebb.paging.configure`.
        limit: maximum bytes of all pools.
        beside: True if copies run beside the compute stream. Then a paged storage stays in memory
            until the next region pages something.
        fixed_order: as in :func:`ebb.paging.step`: values that backward needs next stay in memory.
    """

    speed: float
    page_rows: int = 64
    headroom: float = 1.1
    limit: float = math.inf
    beside: bool = False
    fixed_order: bool = False

    def size_of(self, value: Value) -> int:
        """Bytes that the rows of a value take in a pool."""
        pages = -(-value.live_rows // self.page_rows)
        rows = min(pages * self.page_rows, value.rows)
        return int(rows * self.headroom) * (value.memory // value.rows)

    def time_of(self, value: Value) -> float:
        """Milliseconds to copy a value out and back."""
        live = value.live_rows * (value.memory // value.rows)
        return _EACH + (live + value.memory) / self.speed


NO_PAGER = Pager(speed=1.0)
"""In place of a pager where nothing is paged."""


def has_rows(value: Value) -> bool:
    """True if the value can go to a pool."""
    return value.live_rows > 0 and value.rows > 0 and not value.rows_mixed


@dataclass(frozen=True)
class Paged:
    """A storage that goes to a pool.

    Attributes:
        sent: the storage's memory, and when it is needed.
        value: its contents.
        call: index of its region.
    """

    sent: Sent
    value: Value
    call: int

    @property
    def kind(self) -> Kind:
        """The kind of its pool."""
        return self.value.dtype, self.value.memory // self.value.rows

    @property
    def is_back(self) -> float:
        """When its rows leave the pool."""
        return min(self.sent.asked, self.sent.ended)


@dataclass
class _Use:
    """Rows and pages of one pool: current and largest numbers."""

    pages: int = 0
    rows: int = 0  # if the pool is a stack
    most_pages: int = 0
    most_rows: int = 0
    stack: list[tuple[Paged, int]] = field(default_factory=list)
    gone: set[Paged] = field(default_factory=set)


class Pools:
    """The pools of a step, sized and used as in the C++ code. See Note [How pools are sized].

    Attributes:
        stays: when each storage is in memory.
        nbytes: bytes of all pools.
        are_too_large: True if the pools exceed the limit.
        tickets: allocations and frees of tickets.
        took: milliseconds that copies take.
    """

    def __init__(self, all_paged: Iterable[Paged], pager: Pager) -> None:
        self._pager = pager
        found = sorted(all_paged, key=lambda one: (one.sent.packed, one.sent.memory))
        turning = _turning_points(found) if pager.fixed_order else set()
        next_sends = _when_the_next_sends(found)

        def left(one: Paged) -> float:
            if one.call in turning:
                return math.inf
            return next_sends[one.call] if pager.beside else one.sent.packed

        self.stays = [
            Stays(one.sent, min(left(one), one.sent.asked), one.sent.asked) for one in found
        ]
        paged = [one for one in found if one.call not in turning]
        uses = self._uses(paged)
        is_stack = {
            kind: one.most_rows <= one.most_pages * pager.page_rows for kind, one in uses.items()
        }
        self.nbytes = sum(self._size(kind, one, is_stack[kind]) for kind, one in uses.items())
        self.are_too_large = self.nbytes > pager.limit
        self.tickets = Changes(self._tickets(paged, is_stack))
        self.took = sum(pager.time_of(one.value) for one in paged)

    def _uses(self, paged: Sequence[Paged]) -> Mapping[Kind, _Use]:
        uses: dict[Kind, _Use] = defaultdict(_Use)
        comes = [(one.sent.packed, True, place) for place, one in enumerate(paged)]
        goes = [(one.is_back, False, place) for place, one in enumerate(paged)]
        for _, is_new, place in sorted([*comes, *goes]):
            one = paged[place]
            use, rows = uses[one.kind], one.value.live_rows
            pages = -(-rows // self._pager.page_rows)
            if is_new:
                use.pages += pages
                use.rows += rows
                use.stack.append((one, rows))
            else:
                use.pages -= pages
                use.gone.add(one)
                while use.stack and use.stack[-1][0] in use.gone:
                    use.rows -= use.stack.pop()[1]
            use.most_pages = max(use.most_pages, use.pages)
            use.most_rows = max(use.most_rows, use.rows)
        return uses

    def _size(self, kind: Kind, use: _Use, is_stack: bool) -> int:
        needed = use.most_rows if is_stack else use.most_pages
        pages = -int(-needed * self._pager.headroom // 1)
        rows = pages if is_stack else pages * self._pager.page_rows
        return rows * kind[1] + _STATE + (0 if is_stack else _NUMBER * pages)

    def _tickets(
        self, paged: Iterable[Paged], is_stack: Mapping[Kind, bool]
    ) -> Iterator[tuple[float, int]]:
        for one in paged:
            pages = 0 if is_stack[one.kind] else -(-one.value.rows // self._pager.page_rows)
            size = _NUMBER * (_TICKET + pages)
            yield from [(one.sent.packed, size), (one.is_back, -size)]


def _when_the_next_sends(paged: Sequence[Paged]) -> dict[int, float]:
    """For each call, when the call after it pages its first storage."""
    first: dict[int, float] = {}
    for one in paged:
        first.setdefault(one.call, one.sent.packed)
    calls = sorted(first, key=lambda call: first[call])
    later = [first[call] for call in calls[1:]]
    return dict(zip(calls, [*later, math.inf], strict=False))


def _turning_points(paged: Sequence[Paged]) -> set[int]:
    """Calls whose backward follows directly after their forward."""
    begins: dict[int, float] = {}
    asked: dict[int, float] = {}
    for one in paged:
        begins[one.call] = min(begins.get(one.call, math.inf), one.sent.packed)
        asked[one.call] = min(asked.get(one.call, math.inf), one.sent.asked)
    events = [(when, call) for times in (begins, asked) for call, when in times.items()]
    order = [call for _, call in sorted(events)]
    return {call for call, after in itertools.pairwise(order) if call == after}


class StepsThatRunAgain:
    """Checks that measured steps use ebb.paging.run_step: in other steps no pool may overflow."""

    def __init__(self) -> None:
        self._before = Counter(runs)
        self._marks_before = Counter(marks)
        self._speed: float | None = None  # measured once

    def pager(self, profile: Profile, device: torch.device) -> Pager | None:
        """The pager for a step.

        Args:
            profile: of a step that ran since this object was made.
            device: that holds the rows.

        Returns:
            None if no value has rows, or some were marked outside of :func:`ebb.paging.run_step`.
        """
        since, marked = Counter(runs) - self._before, Counter(marks) - self._marks_before
        if not since or marked[False] or not any(map(has_rows, profile.values)):
            return None
        found = configure()
        if self._speed is None:
            self._speed = _copy_speed(device)
        return Pager(
            self._speed,
            page_rows=found["page_rows"],
            headroom=found["headroom"],
            limit=math.inf if found["device_limit"] is None else found["device_limit"],
            beside=device.type != "cpu",
            fixed_order=since[True] > 0,
        )


def pool_bytes() -> int:
    """Current bytes of all page pools."""
    found: int = _C.paging_stats()["pool_bytes"]
    return found


def size_pools_anew() -> None:
    """Record pool sizes again in the next step, since other values are paged from now on."""
    _C.paging_record_next()
    if _C.paging_stats()["stashes"] == 0:
        with contextlib.suppress(RuntimeError):  # raised inside a step
            reset()


def _copy_speed(device: torch.device) -> float:
    """Bytes that a copy moves in a millisecond."""
    x = torch.zeros(_PROBE, dtype=torch.uint8, device=device)
    y = torch.empty_like(x)
    times = []
    for _ in range(_ROUNDS):
        devices.wait()
        begin = time.perf_counter()
        y.copy_(x)
        devices.wait()
        times.append((time.perf_counter() - begin) * 1e3)
    return _PROBE / max(min(times), 1e-6)
