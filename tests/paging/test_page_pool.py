"""Page pools and stacks against models in Python: the invariants I1 to I15 of the protocol."""

from __future__ import annotations

import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ebb._C  # noqa: F401
from ebb._testing import PagePool
from ebb_tests.gpus import RUNS_PAGE_KERNELS

CUDA = pytest.param("cuda", marks=[pytest.mark.needs_cuda, RUNS_PAGE_KERNELS])
AVAILABLE = ["cpu", CUDA] if torch.cuda.is_available() else ["cpu"]
DEVICES = pytest.mark.parametrize("device", AVAILABLE)
UNTOUCHED, FILLED, FIRST_ROW = range(3)
HEADER = 5  # words of a ticket before the ids of its pages
USED_UP, TOO_MANY, NEGATIVE, NOT_STASHED, STALE, ALREADY = (1 << i for i in range(6))


class Checked:
    """A pool, and beside it what it should be: which pages and bytes each live tensor has."""

    def __init__(self, device, row_bytes, page_rows, device_pages, host_pages):
        self.device = torch.device(device)
        self.pool = PagePool(self.device, row_bytes, page_rows, device_pages, host_pages)
        self.row_bytes, self.page_rows = row_bytes, page_rows
        self.capacity = (device_pages, host_pages)
        self.free = [device_pages, host_pages]
        self.live = []  # ticket, most rows, live rows, bytes, tier
        self.failed = 0
        self.restored = 0
        self.spilled = False
        self.check()

    def rows(self, count):
        return torch.tensor(count, dtype=torch.int64, device=self.device)

    def stash(self, most, rows):
        tensor = torch.randint(
            0, 256, (most, self.row_bytes), dtype=torch.uint8, device=self.device
        )
        ticket = self.pool.make_ticket(most)
        before = self.state()
        self.pool.stash(ticket, tensor, self.rows(rows))
        need = -(-rows // self.page_rows)
        fits = [tier for tier in (0, 1) if self.free[tier] >= need]
        if self.failed == 0 and fits:
            tier = fits[0]  # I10: the device's, if that has room
            self.free[tier] -= need
            self.spilled |= tier == 1
            self.live.append((ticket, most, rows, tensor[:rows].clone(), tier))
        elif self.failed == 0:
            self.failed = USED_UP
        if self.failed:
            after = self.state()
            assert (after["head"], after["tail"], after["free"]) == (
                before["head"],
                before["tail"],
                before["free"],
            )  # I6, I7
        self.check()
        return ticket

    def restore(self, place):
        ticket, most, rows, expected, tier = self.live.pop(place)
        tensor = torch.full((most, self.row_bytes), 7, dtype=torch.uint8, device=self.device)
        self.restored += 1
        fill = self.restored % 3
        self.pool.restore(ticket, tensor, fill_dead_rows=fill, dead=0)
        if self.failed:
            assert bool((tensor == 255).all())
        else:
            assert torch.equal(tensor[:rows], expected)  # I8
            assert torch.equal(tensor[rows:], self.dead(fill, most - rows, expected))  # I14
            self.free[tier] += -(-rows // self.page_rows)
        self.check()

    def dead(self, fill, count, live):
        """Untouched, filled with zeros, or copies of the first row that lives."""
        row = torch.full((self.row_bytes,), 7 if fill == UNTOUCHED else 0, dtype=torch.uint8)
        if fill == FIRST_ROW and len(live) > 0:
            row = live[0]
        return row.to(self.device).expand(count, self.row_bytes)

    def reset(self):
        self.pool.reset()
        self.free, self.live, self.failed, self.spilled = list(self.capacity), [], 0, False
        state = self.check()
        assert state["head"] == (0, 0)  # I12
        assert state["tail"] == self.capacity
        assert state["free"] == tuple(list(range(count)) for count in self.capacity)

    def state(self):
        return self.pool.status()

    def check(self):
        state = self.state()
        assert state["errors"] == self.failed
        assert state["spilled"] == self.spilled  # I11
        for tier in (0, 1):
            free = state["free"][tier]
            available = state["tail"][tier] - state["head"][tier]
            assert available == len(free) == self.free[tier]  # I1 and I9
            assert len(set(free)) == len(free)  # I2
            taken = []
            for ticket, _, rows, _, where in self.live:
                if where == tier:
                    taken += ticket.state[HEADER : HEADER + -(-rows // self.page_rows)].tolist()
            if self.failed == 0:
                assert len(set(taken)) == len(taken)  # I3
                assert set(taken) | set(free) == set(range(self.capacity[tier]))  # I4, I5
                assert not set(taken) & set(free)
        return state


def run(pool, steps, order):
    """Each step is (most rows, live rows), or None for a tensor that comes back."""
    for step in steps:
        if step is not None:
            pool.stash(*step)
        elif pool.live:
            pool.restore(order(len(pool.live)))
    while pool.live:
        pool.restore(order(len(pool.live)))
    if pool.failed == 0:
        assert pool.free == list(pool.capacity)  # I9
    pool.reset()


ROWS = st.sampled_from([1, 2, 3, 4, 8, 16])


@st.composite
def schedules(draw):
    page = draw(st.sampled_from([1, 2, 3, 4]))
    width = draw(st.sampled_from([1, 2, 3, 4, 12, 16, 32]))
    tiers = draw(st.sampled_from([(0, 0), (1, 0), (0, 3), (4, 0), (4, 4), (8, 2), (40, 0)]))
    edges = [0, 1, page - 1, page, page + 1, 3 * page]
    sizes = st.sampled_from(sorted(set(edges))).map(lambda rows: (3 * page + 1, rows))
    steps = draw(st.lists(st.one_of(sizes, st.none()), max_size=10))
    return (width, page, *tiers), steps


# 3,200 schedules a run, in four kinds. Fewer on a GPU, for which each check waits; more
# schedules of the kernels are in test_page_kernels_emulated.py.
EACH = settings(max_examples=800, database=None)
ON_A_GPU = settings(max_examples=250, database=None)
ORDERS = {"last first": lambda n: n - 1, "first first": lambda n: 0, "middle": lambda n: n // 2}


@pytest.mark.sweep
@DEVICES
@pytest.mark.parametrize("order", ORDERS)
def test_schedules(device, order):
    @(EACH if device == "cpu" else ON_A_GPU)
    @given(schedules())
    def program(schedule):
        options, steps = schedule
        run(Checked(device, *options), steps, ORDERS[order])

    program()


@pytest.mark.sweep
@DEVICES
def test_pipeline_schedules(device):
    @(EACH if device == "cpu" else ON_A_GPU)
    @given(schedules(), st.integers(1, 4), st.integers(1, 6))
    def program(schedule, depth, batches):
        """1F1B: so many forwards, then one backward and one forward in turn."""
        options, steps = schedule
        pool = Checked(device, *options)
        sizes = [step for step in steps if step is not None] or [(3, 2)]
        for batch in range(batches):
            pool.stash(*sizes[batch % len(sizes)])
            if batch >= depth and pool.live:
                pool.restore(0)
        while pool.live:
            pool.restore(0)

    program()


@DEVICES
def test_the_ring_goes_round_many_times(device):
    pool = Checked(device, 8, 4, 5, 0)
    for i in range(200):  # I15
        pool.stash(20, 1 + i % 20)
        pool.restore(0)
    assert pool.state()["head"][0] > 10 * 5


@DEVICES
@pytest.mark.parametrize(
    ("rows", "error", "words"),
    [(-1, NEGATIVE, "negative"), (9, TOO_MANY, "more valid rows"), (8, USED_UP, "too small")],
)
def test_counts_that_cannot_be(device, rows, error, words):
    pool = PagePool(torch.device(device), 4, 4, 1, 0)
    ticket = pool.make_ticket(8)
    source = torch.ones(8, 4, dtype=torch.uint8, device=device)
    pool.stash(ticket, source, torch.tensor(rows, device=device))
    status = pool.status()
    assert status["errors"] == error
    assert words in status["error_text"]
    assert status["free"][0] == [0]
    target = torch.zeros(8, 4, dtype=torch.uint8, device=device)
    pool.restore(ticket, target)
    assert bool((target == 255).all())
    pool.reset()
    assert pool.status()["errors"] == 0


@DEVICES
def test_restored_twice_never_stashed_stale_and_stashed_twice(device):
    data = torch.ones(4, 4, dtype=torch.uint8, device=device)
    rows = torch.tensor(4, device=device)

    def fresh():
        pool = PagePool(torch.device(device), 4, 4, 4, 0)
        return pool, pool.make_ticket(4)

    pool, ticket = fresh()
    pool.stash(ticket, data, rows)
    pool.restore(ticket, data.clone())
    before = pool.status()["free"]
    pool.restore(ticket, data.clone())
    assert pool.status()["errors"] == NOT_STASHED
    assert pool.status()["free"] == before

    pool, ticket = fresh()
    pool.restore(ticket, data.clone())
    assert pool.status()["errors"] == NOT_STASHED

    pool, ticket = fresh()
    pool.stash(ticket, data, rows)
    pool.reset()
    pool.restore(ticket, data.clone())
    assert pool.status()["errors"] == STALE
    assert pool.status()["free"][0] == [0, 1, 2, 3]

    pool, ticket = fresh()
    pool.stash(ticket, data, rows)
    pool.stash(ticket, data, rows)
    assert pool.status()["errors"] == ALREADY
    assert len(pool.status()["free"][0]) == 3


@pytest.mark.parametrize("device", [*AVAILABLE, "cpu:0"])
def test_a_count_that_changes_meanwhile(device):
    pool = PagePool(torch.device(device), 4, 4, 4, 0)
    data = torch.randint(0, 256, (8, 4), dtype=torch.uint8, device=device)
    rows = torch.tensor(5, device=device)
    ticket = pool.make_ticket(8)
    pool.stash(ticket, data, rows)
    rows.fill_(1)
    found = torch.empty_like(data)
    pool.restore(ticket, found)
    assert torch.equal(found[:5], data[:5])
    assert bool((found[5:] == 0).all())
    assert pool.status()["errors"] == 0


@pytest.mark.parametrize("options", [(0, 4, 1, 0), (4, 0, 1, 0), (4, 4, -1, 0), (4, 4, 1, -2)])
def test_sizes_that_make_no_sense(options):
    with pytest.raises(RuntimeError, match="INTERNAL ASSERT"):
        PagePool(torch.device("cpu"), *options)


def test_tensors_that_do_not_fit():
    pool = PagePool(torch.device("cpu"), 16, 4, 4, 0)
    ticket = pool.make_ticket(8)
    good, one = torch.zeros(8, 4), torch.tensor(1)
    with pytest.raises(RuntimeError, match="INTERNAL ASSERT"):
        pool.stash(ticket, torch.zeros(7, 4), one)
    for count in (torch.tensor(1.0), torch.tensor([1, 2]), torch.tensor(1, dtype=torch.int32)):
        with pytest.raises(RuntimeError, match="INTERNAL ASSERT"):
            pool.stash(ticket, good, count)
    assert pool.status()["errors"] == 0


def test_other_devices():
    with pytest.raises(NotImplementedError, match="CPU and CUDA, not for meta"):
        PagePool(torch.device("meta"), 4, 4, 1)


def test_speed_of_the_cpu():
    """At least 0.7 of memcpy's bandwidth for rows of 4 KiB; the best of many. By the processor's
    time, in which others on the machine do not count.
    """
    rows = 4096
    data = torch.randint(0, 256, (rows, 4096), dtype=torch.uint8)
    target = torch.empty_like(data)
    pool = PagePool(torch.device("cpu"), 4096, 64, rows // 64)
    count = torch.tensor(rows)
    pages, plain = [], []
    for _ in range(30):
        ticket = pool.make_ticket(rows)
        begin = time.thread_time()
        pool.stash(ticket, data, count)
        pool.restore(ticket, target)
        middle = time.thread_time()
        target.copy_(data)
        data.copy_(target)
        plain.append(time.thread_time() - middle)
        pages.append(middle - begin)
    assert torch.equal(target, data)
    assert min(plain) / min(pages) > 0.7


# Stacks, and pages that are given back without their rows having come back


MOST = 12  # rows of a tensor


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
def test_schedules_of_stacks(device, capacity):
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
    with pytest.raises(RuntimeError, match="INTERNAL ASSERT"):
        PagePool(torch.device("cpu"), 4, 4, 3, stack=True)
