"""Page pools of a simulated step: what they hold, and when padded storages are in memory."""

from __future__ import annotations

import math

import pytest

import ebb
from ebb._plan.profile.copies import NO_PAGER, Pager, has_rows
from ebb._plan.profile.profile import Value
from ebb._plan.simulate.transfers import Paged, Pools, Sent

ROW = 256
PAGER = Pager(speed=1000.0, page_rows=8, headroom=1.25)


def value(live=10, rows=64, mixed=False):
    return Value(
        ROW * rows, (rows, ROW // 4), "float32", "recomputed", "", True, 1, 0.0, -1.0, 1.0, 1.0,
        2, 3.0, rows, live, mixed,
    )  # fmt: skip


def paged(memory, packed, asked, live=10, call=0, ended=None, rows=64):
    until = asked + 1 if ended is None else ended
    sent = Sent(memory, ROW * rows, packed - 0.5, packed, asked, until)
    return Paged(sent, value(live, rows), call)


def test_what_has_rows():
    assert has_rows(value())
    assert not has_rows(value(live=0, rows=0))
    assert not has_rows(value(live=-1))  # the count cannot be right
    assert not has_rows(value(mixed=True))


def test_what_comes_back_in_the_opposite_order_is_a_stack():
    pools = Pools([paged(0, 1.0, 4.0), paged(1, 2.0, 3.0, live=3)], PAGER)

    rows = math.ceil(13 * 1.25)
    assert pools.nbytes == rows * ROW + 128
    assert pools.tickets.at(2.5) == 2 * 40


def test_what_comes_back_in_another_order_has_pages():
    """A stack would have to hold more than pages do."""
    many = [paged(0, 1.0, 2.0, live=8), paged(1, 1.5, 5.0, live=8), paged(2, 3.0, 4.0, live=8)]

    pools = Pools(many, PAGER)

    pages = math.ceil(2 * 1.25)  # that two need at a time
    assert pools.nbytes == pages * 8 * ROW + 128 + 8 * pages
    assert pools.tickets.at(1.75) == 2 * (40 + 8 * 8)


def test_kinds_of_rows_have_pools_of_their_own():
    both = [paged(0, 1.0, 4.0), Paged(paged(1, 2.0, 3.0).sent, value(5, 128), 0)]
    both[1] = Paged(both[1].sent, value(5, 128).__class__(**{
        **vars(value(5, 128)), "dtype": "bfloat16"}), 0)  # fmt: skip

    pools = Pools(both, PAGER)

    assert pools.nbytes == (math.ceil(10 * 1.25) + math.ceil(5 * 1.25)) * ROW + 2 * 128


def test_a_storage_is_there_until_it_is_sent_and_from_when_it_is_asked_for():
    (stays,) = Pools([paged(0, 1.0, 4.0)], PAGER).absences

    assert (stays.left, stays.fetched) == (1.0, 4.0)


def test_beside_the_work_it_is_there_until_the_next_region_sends():
    beside = Pager(speed=1000.0, beside=True)
    many = [paged(0, 1.0, 9.0), paged(1, 2.0, 8.0), paged(2, 3.0, 7.0, call=1)]

    stays = Pools(many, beside).absences

    assert [one.left for one in stays] == [3.0, 3.0, 7.0]  # the last: until it is wanted again


def test_in_a_fixed_order_what_comes_next_stays():
    fixed = Pager(speed=1000.0, fixed_order=True)
    many = [paged(0, 1.0, 9.0), paged(1, 2.0, 8.0, call=1)]

    pools = Pools(many, fixed)

    assert [(one.left, one.fetched) for one in pools.absences] == [(1.0, 9.0), (8.0, 8.0)]
    assert pools.nbytes < Pools(many, Pager(speed=1000.0)).nbytes
    assert pools.took == pytest.approx(fixed.time_of(many[0].value))


def test_where_nothing_is_paged_there_are_none():
    pools = Pools([], NO_PAGER)

    assert (pools.nbytes, pools.took, pools.absences, pools.are_too_large) == (0, 0.0, [], False)


def test_a_limit():
    assert Pools([paged(0, 1.0, 4.0)], Pager(speed=1.0, limit=100)).are_too_large


@pytest.mark.parametrize("live", [1, 8, 63, 64])
@pytest.mark.parametrize("in_order", [True, False])
def test_pools_are_as_large_as_the_engines(live, in_order):
    """Three layers whose storages come back in the opposite order, or in that of forward."""
    import torch

    ebb.config.update(paging_page_rows=8, paging_headroom=1.25)
    policy = ebb.Policy({"aten::mul": ebb.PAGE})
    for _ in range(2):
        losses = []
        for _ in range(3):
            x = torch.randn(64, ROW // 4, requires_grad=True)
            with ebb.region(policy):
                h = ebb.experimental.mark_rows(x.clone(), torch.tensor(live))
                losses.append((h * 2).sin()[:live].sum())
        for loss in losses if in_order else losses[::-1]:
            loss.backward()
    found = ebb.stats()["paging"]["pool_bytes"]

    asked = [4.0, 5.0, 6.0] if in_order else [6.0, 5.0, 4.0]
    many = [paged(one, float(one), asked[one], live=live, call=one) for one in range(3)]
    assert Pools(many, PAGER).nbytes == found
