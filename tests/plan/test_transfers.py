"""Copies of a step are simulated as the engine makes them."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebb._plan.profile.copies import Link
from ebb._plan.simulate.transfers import Sent, Transfers

LINK = Link(out=10.0, back=5.0, least=1, room=10_000)  # bytes in a millisecond


def sent(place, size, packed, asked, ended=None):
    ended = asked + 1 if ended is None else ended
    return Sent(place, size, packed, packed, asked, ended)


def by_memory(transfers):
    return {one.sent.memory: one for one in transfers.absences}


def test_memory_is_free_when_the_host_has_waited_for_a_later_one():
    found = Transfers([sent(0, 10, 1, 103), sent(1, 10, 5, 102), sent(2, 10, 9, 101)], LINK, 10)

    assert [by_memory(found)[n].left for n in range(3)] == [5, 9, math.inf]


def test_the_copies_of_what_was_sent_last_hold_it():
    found = by_memory(Transfers([sent(0, 10, 1, 50), sent(1, 10, 2, 40)], LINK, 100))

    assert all(one.left == math.inf for one in found.values())


def test_each_is_fetched_with_what_was_sent_before_it():
    all_sent = [sent(n, 10, n, 100 - n) for n in range(6)]

    found = by_memory(Transfers(all_sent, LINK, 20))

    # 4 and 5 stay; when 5 is asked for there is room for two ahead, then for one more each time
    assert [found[n].left for n in range(6)] == [2, 3, 4, 5, math.inf, math.inf]
    assert [found[n].fetched for n in range(4)] == [98, 97, 95, 95]


def test_the_host_waits_for_copies_that_are_slower_than_the_work():
    slow = Transfers([sent(n, 100, n, 1000 - 100 * n) for n in range(3)], LINK, 100)
    quick = Transfers([sent(n, 100, 20 * n, 1000 - 100 * n) for n in range(3)], LINK, 100)

    # sent at 0 and, for the window, when copies end: at 10, 20; those go on at 1 and 2
    assert slow.waited == pytest.approx(9 + 9)
    assert quick.waited == 0


def test_the_device_waits_for_what_comes_back_late():
    all_sent = [sent(0, 100, 0, 501), sent(1, 1, 50, 500), sent(2, 200, 90, 499)]

    found = Transfers(all_sent, LINK, 200)

    # both have left, and are fetched when 2 is asked for; the first takes 0.2, and then 20 pass
    assert by_memory(found)[0].fetched == by_memory(found)[1].fetched == 499
    assert found.waited == pytest.approx(499 + 20.2 - 501)


def test_where_there_is_no_room_on_the_host_it_stays():
    link = Link(10.0, 5.0, 1, room=25)

    found = by_memory(Transfers([sent(n, 10, n, 100 - n) for n in range(4)], link, 0))

    assert [found[n].left for n in range(4)] == [0, 1, found[2].sent.ended, found[3].sent.ended]


def test_nothing_sent_costs_nothing():
    found = Transfers([], LINK, 10)

    assert (found.absences, found.waited, found.moved) == ([], 0.0, 0)


@st.composite
def steps(draw):
    sizes = draw(st.lists(st.integers(1, 50), max_size=12))
    asked = draw(st.permutations(range(len(sizes))))
    return [sent(n, size, n, 100 + asked[n]) for n, size in enumerate(sizes)]


@given(steps(), st.integers(0, 120))
def test_no_more_than_the_window_is_under_way_or_ahead(all_sent, window):
    found = Transfers(all_sent, LINK, window).absences

    assert sorted(one.sent.memory for one in found) == list(range(len(all_sent)))
    for one in found:
        assert one.left >= one.sent.packed
        assert one.left < math.inf or one.fetched == one.sent.needed
        assert one.fetched <= one.sent.needed
    for now in [one.packed for one in all_sent]:
        flying = [s.sent.size for s in found if s.sent.packed <= now < s.left]
        assert sum(flying) <= window
    for now in range(100, 100 + len(all_sent)):
        ahead = [
            s.sent.size for s in found if s.left < math.inf and s.fetched <= now < s.sent.needed
        ]
        assert sum(ahead) <= window


@given(steps())
def test_a_faster_link_waits_less(all_sent):
    slow, fast = Link(1.0, 1.0, 1, 10_000), Link(4.0, 4.0, 1, 10_000)

    assert Transfers(all_sent, fast, 30).waited <= Transfers(all_sent, slow, 30).waited + 1e-9
