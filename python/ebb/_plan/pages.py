"""Paging in a step. In: storages with rows, and a `Pager`. Out: pools, and the time of copies."""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ebb import _C
from ebb._plan.changes import Changes, during
from ebb._plan.profile import Profile, Value
from ebb._plan.transfers import Absence, Sent
from ebb._support import devices
from ebb.paging import configure, reset
from ebb.paging._mark_rows import marks
from ebb.paging._run_step import runs

_PROBE = 4 * 2**20  # bytes of one timed copy
_ROUNDS = 5
_EACH = 0.01  # host milliseconds for one storage, out and back
# Bytes of a pool's state, and of one number on the device. Each paged tensor has a ticket on the
# device that says where its rows are. A ticket has _TICKET numbers, and one more for each page.
_STATE, _NUMBER, _TICKET = 128, 8, 5

Kind = tuple[str, int]
"""Identifies storages that share a pool: their dtype, and the bytes of a row."""


@dataclass(frozen=True)
class Pager:
    """Settings and speed of paging."""

    speed: float  # bytes that one copy moves in a millisecond
    page_rows: int = 64  # as in ebb.paging.configure
    headroom: float = 1.1
    limit: float = math.inf  # maximum bytes of all pools
    # True if copies run on a stream of ebb's own. Then a paged storage stays in memory until the
    # next region pages something.
    beside: bool = False
    # As in ebb.paging.step: a layer whose backward directly follows its forward is not paged.
    fixed_order: bool = False

    def pages(self, rows: int) -> int:
        """Pages for a number of rows."""
        return -(-rows // self.page_rows)

    def size_of(self, value: Value) -> int:
        """Bytes that the rows of a value take in a pool."""
        rows = min(self.pages(value.live_rows) * self.page_rows, value.rows)
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
        next_sends = dict(
            zip(calls, [*(begins[call] for call in calls[1:]), math.inf], strict=False)
        )

        def left(paged: Paged) -> float:
            if paged.call in turning:
                return math.inf
            return next_sends[paged.call] if pager.beside else paged.sent.packed

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
        self.tickets = Changes(self._tickets(in_pools, stacks))
        # Milliseconds that copies take.
        self.took = sum(pager.time_of(paged.value) for paged in in_pools)

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

    def _tickets(
        self, in_pools: Iterable[Paged], stacks: Container[Kind]
    ) -> Iterator[tuple[float, int]]:
        for paged in in_pools:
            pages = 0 if paged.kind in stacks else self._pager.pages(paged.value.rows)
            yield from during(paged.sent.packed, paged.returns, _NUMBER * (_TICKET + pages))


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


class StepsThatRunAgain:
    """Checks that measured steps use ebb.paging.run_step. Other steps cannot run again after an
    overflow, so a plan must not page in them."""

    def __init__(self) -> None:
        self._before = Counter(runs)
        self._marks_before = Counter(marks)
        self._speed: float | None = None  # measured once

    def pager(self, profile: Profile, device: torch.device) -> Pager | None:
        """The pager for a step that ran since this object was made. None if no value has rows, or
        some were marked outside of :func:`ebb.paging.run_step`."""
        since, marked = Counter(runs) - self._before, Counter(marks) - self._marks_before
        if not since or marked[False] or not any(map(has_rows, profile.values)):
            return None
        settings = configure()
        if self._speed is None:
            self._speed = _copy_speed(device)
        return Pager(
            self._speed,
            page_rows=settings["page_rows"],
            headroom=settings["headroom"],
            limit=math.inf if settings["device_limit"] is None else settings["device_limit"],
            beside=device.type != "cpu",
            fixed_order=since[True] > 0,
        )


def pool_bytes() -> int:
    """Current bytes of all page pools."""
    nbytes: int = _C.paging_stats()["pool_bytes"]
    return nbytes


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
