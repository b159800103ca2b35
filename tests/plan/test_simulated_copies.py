"""Copies to the host and page pools of a simulated step: when storages are in memory."""

from __future__ import annotations

import math
from dataclasses import replace
from math import inf

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ebb
from ebb._plan.profile.copies import NO_PAGER, Link, Pager, has_rows
from ebb._plan.profile.profile import Value
from ebb._plan.simulate.transfers import Paged, Pools, Sent, Transfers

LINK = Link(out=10.0, back=5.0, least=1, room=10_000)  # bytes per millisecond


def sent(place, size, packed, asked):
    return Sent(place, size, packed, packed, asked, asked + 1)


def all_sent(*storages):
    """`storages`: for each its size, when it is packed, and when backward needs it."""
    return [sent(place, *one) for place, one in enumerate(storages)]


EARLY = [(10, n, 100 - n) for n in range(6)]


@pytest.mark.parametrize(
    ("storages", "link", "window", "left"),
    [
        ([(10, 1, 103), (10, 5, 102), (10, 9, 101)], LINK, 10, [5, 9, inf]),
        ([(10, 1, 50), (10, 2, 40)], LINK, 100, [inf, inf]),
        (EARLY, LINK, 20, [2, 3, 4, 5, inf, inf]),
        (EARLY[:4], replace(LINK, room=25), 0, [0, 1, 99, 98]),  # two find room on the host
        ([], LINK, 10, []),
    ],
)
def test_storages_leave_when_the_host_has_waited_for_their_copies(storages, link, window, left):
    found = Transfers(all_sent(*storages), link, window)

    assert [one.left for one in found.absences] == left
    assert found.moved == 10 * min(len(storages), link.room // 10)
    assert storages or found.waited == 0


def test_storages_are_fetched_together_with_those_sent_before_them():
    found = Transfers(all_sent(*EARLY), LINK, 20).absences

    # 4 and 5 stay; when 5 is needed there is room for two ahead, then for one more each time
    assert [one.fetched for one in found[:4]] == [98, 97, 95, 95]


@pytest.mark.parametrize(
    ("storages", "window", "waited"),
    [
        # The host waits: copies end at 10 and 20, and the program goes on at 1 and 2.
        ([(100, n, 1000 - 100 * n) for n in range(3)], 100, 9 + 9),
        ([(100, 20 * n, 1000 - 100 * n) for n in range(3)], 100, 0),
        # The device waits: both are fetched when 2 is needed, the first takes 0.2, the other 20.
        ([(100, 0, 501), (1, 50, 500), (200, 90, 499)], 200, 499 + 20.2 - 501),
    ],
)
def test_step_waits_for_copies_that_are_slower_than_the_work(storages, window, waited):
    found = Transfers(all_sent(*storages), LINK, window)

    assert found.waited == pytest.approx(waited)


@st.composite
def steps(draw):
    sizes = draw(st.lists(st.integers(1, 50), max_size=12))
    asked = draw(st.permutations(range(len(sizes))))
    return [sent(n, size, n, 100 + asked[n]) for n, size in enumerate(sizes)]


@given(steps(), st.integers(0, 120))
def test_bytes_in_flight_and_bytes_ahead_are_at_most_the_window(storages, window):
    found = Transfers(storages, LINK, window).absences

    assert sorted(one.sent.memory for one in found) == list(range(len(storages)))
    for one in found:
        assert one.left >= one.sent.packed
        assert one.left < inf or one.fetched == one.sent.needed
        assert one.fetched <= one.sent.needed
    for now in [one.packed for one in storages]:
        flying = [s.sent.size for s in found if s.sent.packed <= now < s.left]
        assert sum(flying) <= window
    for now in range(100, 100 + len(storages)):
        ahead = [s.sent.size for s in found if s.left < inf and s.fetched <= now < s.sent.needed]
        assert sum(ahead) <= window


@given(steps())
def test_faster_link_waits_less(storages):
    slow, fast = Link(1.0, 1.0, 1, 10_000), Link(4.0, 4.0, 1, 10_000)

    assert Transfers(storages, fast, 30).waited <= Transfers(storages, slow, 30).waited + 1e-9


# Page pools

ROW = 256
PAGER = Pager(speed=1000.0, page_rows=8, headroom=1.25)


def value(valid=10, rows=64, mixed=False, dtype="float32"):
    return Value(
        ROW * rows, (rows, ROW // 4), dtype, "recomputed", "", True, 1, 0.0, -1.0, 1.0, 1.0,
        2, 3.0, rows, valid, mixed,
    )  # fmt: skip


def paged(memory, packed, asked, valid=10, call=0, **of_value):
    storage = Sent(memory, ROW * 64, packed - 0.5, packed, asked, asked + 1)
    return Paged(storage, value(valid, **of_value), call)


def test_values_with_valid_rows_that_no_operator_mixes_can_be_paged():
    assert has_rows(value())
    assert not has_rows(value(valid=0, rows=0))
    assert not has_rows(value(valid=-1))  # the count cannot be right
    assert not has_rows(value(mixed=True))


def with_headroom(count):
    return math.ceil(count * 1.25)


@pytest.mark.parametrize(
    ("storages", "nbytes", "now", "tickets"),
    [
        # A stack, where rows come back in the opposite order.
        ([(1.0, 4.0, 10), (2.0, 3.0, 3)], with_headroom(13) * ROW + 128, 2.5, 2 * 40),
        # Pages, where a stack would hold more rows. Two storages need a page at a time.
        (
            [(1.0, 2.0, 8), (1.5, 5.0, 8), (3.0, 4.0, 8)],
            with_headroom(2) * (8 * ROW + 8) + 128,
            1.75,
            2 * (40 + 8 * 8),
        ),
    ],
    ids=["stack", "pages"],
)
def test_size_of_pools_follows_from_the_order_of_backward(storages, nbytes, now, tickets):
    pools = Pools([paged(n, *one) for n, one in enumerate(storages)], PAGER)

    assert pools.nbytes == nbytes
    assert pools.tickets.at(now) == tickets
    assert Pools([paged(0, 1.0, 4.0)], replace(PAGER, limit=100)).are_too_large


def test_rows_of_another_type_have_their_own_pool():
    pools = Pools([paged(0, 1.0, 4.0), paged(1, 2.0, 3.0, 5, rows=128, dtype="bfloat16")], PAGER)

    assert pools.nbytes == (with_headroom(10) + with_headroom(5)) * ROW + 2 * 128


@pytest.mark.parametrize(
    ("pager", "absences"),
    [
        ({}, [(1.0, 9.0), (2.0, 8.0), (3.0, 7.0)]),
        # Beside the work: until the next region pages; the last one until it is needed again.
        ({"beside": True}, [(3.0, 9.0), (3.0, 8.0), (7.0, 7.0)]),
        # In a fixed order, what backward needs first stays.
        ({"fixed_order": True}, [(1.0, 9.0), (2.0, 8.0), (7.0, 7.0)]),
    ],
)
def test_storages_are_in_memory_until_paged_and_again_when_fetched(pager, absences):
    pager = Pager(speed=1000.0, **pager)
    storages = [paged(0, 1.0, 9.0), paged(1, 2.0, 8.0), paged(2, 3.0, 7.0, call=1)]

    pools = Pools(storages, pager)

    assert [(one.left, one.fetched) for one in pools.absences] == absences
    moved = [one for one in pools.absences if one.left < one.fetched or not pager.fixed_order]
    assert pools.took == pytest.approx(len(moved) * pager.time_of(value()))
    fixed, other = Pools(storages, replace(pager, fixed_order=True)), Pools(storages, pager)
    assert fixed.nbytes <= other.nbytes
    assert (fixed.nbytes == other.nbytes) == pager.fixed_order


def test_nothing_paged_needs_no_pool():
    pools = Pools([], NO_PAGER)

    assert (pools.nbytes, pools.took, pools.absences, pools.are_too_large) == (0, 0.0, [], False)


@pytest.mark.parametrize("valid", [1, 8, 63, 64])
@pytest.mark.parametrize("in_order", [True, False])
def test_simulated_pools_are_as_large_as_real_ones(valid, in_order):
    """Three layers whose storages come back in the opposite order, or in that of forward."""
    ebb.config.update(paging_page_rows=8, paging_headroom=1.25)
    policy = ebb.Policy({"aten::mul": ebb.PAGE})
    for _ in range(2):
        losses = []
        for _ in range(3):
            x = torch.randn(64, ROW // 4, requires_grad=True)
            with ebb.region(policy):
                h = ebb.experimental.mark_rows(x.clone(), torch.tensor(valid))
                losses.append((h * 2).sin()[:valid].sum())
        for loss in losses if in_order else losses[::-1]:
            loss.backward()
    found = ebb.stats()["paging"]["pool_bytes"]

    asked = [4.0, 5.0, 6.0] if in_order else [6.0, 5.0, 4.0]
    storages = [paged(n, float(n), asked[n], valid, call=n) for n in range(3)]
    assert Pools(storages, PAGER).nbytes == found
