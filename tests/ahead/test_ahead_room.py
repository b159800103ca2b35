"""Regions keep recomputable values while there is room (Note [Kept while there is room]), and
RECOMPUTE_EACH_TIME there and ahead of backward."""

from __future__ import annotations

import pytest
import torch

import ebb
from ebb import _C, SAVE, Policy, _testing
from ebb_tests.exactness import replayed, same_bits
from ebb_tests.programs.ahead import WaitInBackward, counts, dropout_mlps, room
from ebb_tests.programs.each_time import EACH_TIME, NBYTES, SIZE, held_every
from ebb_tests.replays import replays_ahead

WIDTH, BLOCKS = 64, 4
MIB = 2**20


def gradients(net, x):
    net.zero_grad()
    torch.manual_seed(1)
    net(x).square().sum().backward()
    return [p.grad.clone() for p in net.parameters()]


def under(net, x):
    """Gradients, how many operators ran again, and how many regions gave up what they had kept."""
    before = ebb.stats()["total"]["ops_replayed"], _C.room_stats()["regions_given_up"]
    with ebb.apply(net, ebb.policies.recompute_all, "[0-9]"):
        found = gradients(net, x)
    after = ebb.stats()["total"]["ops_replayed"], _C.room_stats()["regions_given_up"]
    return found, after[0] - before[0], after[1] - before[1]


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("has_room", [True, False])
def test_without_room_all_but_the_last_region_is_given_up(dropout, has_room):
    """While there is room nothing runs again. In both cases gradients are eager's."""
    net, x = dropout_mlps(BLOCKS, WIDTH, dropout), torch.randn(32, WIDTH)
    expected = gradients(net, x)
    with room(5 * MIB, 1 if has_room else 10 * MIB):
        found, again, given_up = under(net, x)

    assert all(map(same_bits, found, expected))
    assert given_up == (0 if has_room else BLOCKS - 1)
    assert (again > 0) == (not has_room)


def test_earliest_regions_are_given_up_and_no_more_than_needed():
    net, x = dropout_mlps(BLOCKS, WIDTH, 0.0), torch.randn(32, WIDTH)
    whole = 10 * MIB
    with room(whole), ebb.apply(net, ebb.policies.recompute_all, "[0-9]"):
        gradients(net, x)  # how much a region keeps is known from now on
        h = net[0](x)
        h = net[1](h)
        _testing.pretend_bytes_in_use(whole)  # what was kept last fits no more
        given_up = _C.room_stats()["regions_given_up"]
        h = net[2](h)
        assert _C.room_stats()["regions_given_up"] == given_up + 2
        _testing.pretend_bytes_in_use(1)
        h = net[3](h)
        ebb.reset_stats()
        h.sum().backward()

    again = [
        ebb.stats()["regions"].get(str(region), {}).get("ops_replayed", 0)
        for region in range(BLOCKS)
    ]
    assert [count > 0 for count in again] == [True, True, False, False]


def test_memory_of_a_step_without_backward_is_given_back(no_objects_left):
    net, x = dropout_mlps(BLOCKS, WIDTH, 0.0), torch.randn(1024, WIDTH)
    with room(), ebb.apply(net, ebb.policies.recompute_all, "[0-9]"):
        for _ in range(3):
            net(x)


def test_write_to_a_kept_value_raises():
    w = torch.randn(WIDTH, requires_grad=True)
    with room(), ebb.region(ebb.policies.recompute_all):
        h = w * 2
        y = h.sin()
    with torch.no_grad():
        h.add_(1)

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


# RECOMPUTE_EACH_TIME


def regions_ahead(policy, limit="1GiB", length=6):
    """Gradients of five regions whose replays may run ahead, and what those did."""
    x = torch.linspace(0, 1, SIZE, dtype=torch.float64, requires_grad=True)
    found = []

    def step():
        h = x
        for _ in range(5):
            with ebb.region(policy):
                h = sines(WaitInBackward.apply(h), length)
        found.append(torch.autograd.grad(h.sum(), x)[0])

    with replays_ahead(limit=limit):
        did = counts(step)
        assert ebb.stats()["ahead"]["bytes"] == 0
    total = ebb.stats()["total"]
    return found[0], did | {name: total[name] for name in ("ops_replayed", "ops_replayed_ahead")}


def test_each_time_values_are_left_to_backward():
    found, did = regions_ahead(EACH_TIME)

    assert same_bits(found, regions_ahead(Policy(default=SAVE))[0])
    assert did["regions_in_time"] == 0
    assert did["regions_held"] == 0
    assert did["regions_stopped"] == 4
    assert did["failures"] == 0
    assert did["ops_replayed"] == 5 * sum(range(6))


@pytest.mark.parametrize("limit", [2, 3, 4, 100])
def test_values_that_read_each_time_values_are_recomputed_ahead_if_there_is_room(limit):
    """There must be room for the two that are held, and one more."""
    found, did = regions_ahead(held_every(5), limit=limit * NBYTES, length=11)

    assert same_bits(found, regions_ahead(Policy(default=SAVE), length=11)[0])
    assert did["regions_stopped"] == 4
    assert did["ops_replayed_ahead"] <= 4 * 10
    assert (did["ops_replayed_ahead"] == 4 * 10) == (limit > 2)


def sines(x, count):
    for _ in range(count):
        x = x.sin()
    return x


@pytest.mark.parametrize("has_room", [True, False])
def test_each_time_values_are_kept_while_there_is_room(has_room):
    x = torch.linspace(0, 1, SIZE, dtype=torch.float64, requires_grad=True)
    with room(1 << 40) if has_room else room(1 << 20, used=1 << 30):
        with ebb.region(EACH_TIME):
            h = sines(x, 4)
        with ebb.region(EACH_TIME):
            loss = h.sin().sum()
        del h
        before = replayed()
        found = torch.autograd.grad(loss, x)[0]
        count = replayed() - before

    assert count == (0 if has_room else sum(range(4)))
    assert same_bits(found, torch.autograd.grad(sines(x, 5).sum(), x)[0])
