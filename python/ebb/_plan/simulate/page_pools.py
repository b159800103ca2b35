"""Page pools. In: storages with rows, and a `Pager`. Out: pools, and the time of copies."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ebb._plan.profile.pager import Pager
from ebb._plan.profile.profile import Value
from ebb._plan.simulate.changes import Changes, during
from ebb._plan.simulate.transfers import Absence, Sent

# Bytes of a pool's state, and of one number on the device. Each paged tensor has a ticket on the
# device that says where its rows are. A ticket has _TICKET numbers, and one more for each page.
_STATE, _NUMBER, _TICKET = 128, 8, 5

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
