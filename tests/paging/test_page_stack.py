"""Page pools that are stacks, and pages that are given back without their rows having come back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ebb._C  # noqa: F401
from ebb._testing import PagePool

CUDA = pytest.param("cuda", marks=pytest.mark.needs_cuda)
DEVICES = pytest.mark.parametrize("device", ["cpu", CUDA] if torch.cuda.is_available() else ["cpu"])
USED_UP = 1
MOST = 12


class Stack:
    """A stack, and beside it what it should hold: rows are given back in the reverse order only."""

    def __init__(self, device, capacity):
        self.device, self.capacity = torch.device(device), capacity
        self.pool = PagePool(self.device, 4, 1, *capacity, stack=True)
        self.top = [0, 0]
        self.slots = []  # ticket, bytes, tier, and whether the rows have come back
        self.failed = False

    def stash(self, rows):
        tensor = torch.randint(0, 256, (MOST, 4), dtype=torch.uint8, device=self.device)
        ticket = self.pool.make_ticket(MOST)
        self.pool.stash(ticket, tensor, torch.tensor(rows, device=self.device))
        fits = [t for t in (0, 1) if self.capacity[t] - self.top[t] >= rows]
        if self.failed:
            pass
        elif fits:
            self.top[fits[0]] += rows
            self.slots.append([ticket, tensor[:rows].clone(), fits[0], False])
        else:
            self.failed = True
        self.check()

    def restore(self, place):
        ticket, expected, _, back = self.slots[place]
        if back:
            return
        last = place == len(self.slots) - 1
        found = torch.full((MOST, 4), 7, dtype=torch.uint8, device=self.device)
        self.pool.restore(ticket, found, keep_pages=not last)
        if self.failed:
            assert bool((found == 255).all())
            return
        assert torch.equal(found[: len(expected)], expected)
        assert bool((found[len(expected) :] == 0).all())
        self.slots[place][3] = True
        if last:
            self.gone(self.slots.pop())
        while self.slots and self.slots[-1][3]:
            self.give_back()
        self.check()

    def give_back(self):
        """Whether its rows have come back or not."""
        slot = self.slots.pop()
        self.pool.give_back(slot[0])
        if not self.failed:
            self.gone(slot)
        self.check()

    def gone(self, slot):
        self.top[slot[2]] -= len(slot[1])

    def check(self):
        status = self.pool.status()
        assert status["errors"] == (USED_UP if self.failed else 0)
        assert list(status["head"]) == self.top
        assert status["tail"] == self.capacity

    def reset(self):
        self.pool.reset()
        self.top, self.slots, self.failed = [0, 0], [], False
        self.check()

    def run(self, actions):
        for action, number in actions:
            if action == "stash":
                self.stash(number)
            elif action == "reset":
                self.reset()
            elif self.slots and action == "restore":
                self.restore(number % len(self.slots))
            elif self.slots:
                self.give_back()


ACTIONS = st.lists(
    st.one_of(
        st.integers(0, MOST).map(lambda rows: ("stash", rows)),
        st.integers(0, 20).map(lambda place: ("restore", place)),
        st.just(("give back", 0)),
        st.just(("reset", 0)),
    ),
    max_size=30,
)


@DEVICES
@pytest.mark.parametrize("capacity", [(30, 0), (20, 20), (0, 16), (0, 0), (1000, 0)])
def test_schedules(device, capacity):
    @settings(max_examples=500 if device == "cpu" else 50, database=None)  # a check waits there
    @given(ACTIONS)
    def program(actions):
        stack = Stack(device, capacity)
        stack.run(actions)
        while stack.slots and not stack.failed:
            if stack.slots[-1][3]:
                stack.give_back()
            else:
                stack.restore(len(stack.slots) - 1)
        if not stack.failed:
            assert stack.top == [0, 0]

    program()


@DEVICES
def test_a_dropped_tensor_gives_its_pages_back(device):
    pool = PagePool(torch.device(device), 4, 4, 3)
    data = torch.ones(8, 4, dtype=torch.uint8, device=device)
    for _ in range(10):
        ticket = pool.make_ticket(8)
        pool.stash(ticket, data, torch.tensor(7, device=device))
        pool.give_back(ticket)
        pool.give_back(ticket)  # there is nothing left to give
    status = pool.status()
    assert status["errors"] == 0
    assert sorted(status["free"][0]) == [0, 1, 2]


@DEVICES
def test_nothing_is_given_back_twice(device):
    pool = PagePool(torch.device(device), 4, 4, 3)
    data = torch.ones(8, 4, dtype=torch.uint8, device=device)
    rows = torch.tensor(7, device=device)
    ticket = pool.make_ticket(8)
    pool.give_back(ticket)  # never stashed
    pool.stash(ticket, data, rows)
    pool.restore(ticket, data.clone(), keep_pages=True)
    assert len(pool.status()["free"][0]) == 1
    pool.give_back(ticket)
    pool.give_back(ticket)
    assert sorted(pool.status()["free"][0]) == [0, 1, 2]
    stale = pool.make_ticket(8)
    pool.stash(stale, data, rows)
    pool.reset()
    pool.give_back(stale)
    assert sorted(pool.status()["free"][0]) == [0, 1, 2]
    assert pool.status()["errors"] == 0


def test_a_stack_has_pages_of_one_row():
    with pytest.raises(ValueError, match="page size must be 1 in a stack; it is 4"):
        PagePool(torch.device("cpu"), 4, 4, 3, stack=True)
