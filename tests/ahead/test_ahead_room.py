"""What is kept while there is room, though it can be made again: Note [Kept while there is room]"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ebb
from ebb import _C, _testing
from ebb_tests.exactness import same_bits

WIDTH, BLOCKS = 64, 4
MIB = 2**20


@pytest.fixture
def room():
    """Sets the limit, and what is in use."""

    def configure(limit, used):
        _C.keep_while_there_is_room(limit)
        _testing.pretend_bytes_in_use(used)

    yield configure
    configure(0, 0)


def model(dropout=0.0):
    torch.manual_seed(0)
    block = lambda: nn.Sequential(  # noqa: E731
        nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(dropout), nn.Linear(WIDTH, WIDTH), nn.Tanh()
    )
    return nn.Sequential(*(block() for _ in range(BLOCKS)))


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
def test_without_room_all_but_the_last_region_is_given_up(room, dropout, has_room):
    """While there is room nothing runs again. In both cases gradients are eager's."""
    net, x = model(dropout), torch.randn(32, WIDTH)
    expected = gradients(net, x)
    room(5 * MIB, 1 if has_room else 10 * MIB)

    found, again, given_up = under(net, x)

    assert all(map(same_bits, found, expected))
    assert given_up == (0 if has_room else BLOCKS - 1)
    assert (again > 0) == (not has_room)


def test_the_earliest_are_given_up_and_no_more_than_is_needed(room):
    net, x = model(), torch.randn(32, WIDTH)
    whole = 10 * MIB
    room(whole, 1)
    with ebb.apply(net, ebb.policies.recompute_all, "[0-9]"):
        gradients(net, x)  # how much a region keeps is known from now on
        h = net[0](x)
        h = net[1](h)
        room(whole, whole)  # what was kept last fits no more
        given_up = _C.room_stats()["regions_given_up"]
        h = net[2](h)
        assert _C.room_stats()["regions_given_up"] == given_up + 2
        room(whole, 1)
        h = net[3](h)
        replayed = {}
        for region in range(BLOCKS):
            replayed[region] = ebb.stats()["regions"].get(str(region), {}).get("ops_replayed", 0)
        h.sum().backward()

    again = [
        ebb.stats()["regions"][str(region)]["ops_replayed"] - replayed[region]
        for region in range(BLOCKS)
    ]
    assert again[0] > 0
    assert again[1] > 0
    assert again[2:] == [0, 0]


def test_memory_of_a_step_without_backward_is_given_back(room, no_objects_left):
    net, x = model(), torch.randn(1024, WIDTH)
    room(2**40, 1)
    with ebb.apply(net, ebb.policies.recompute_all, "[0-9]"):
        for _ in range(3):
            net(x)


def test_a_write_to_what_is_kept_is_seen(room):
    w = torch.randn(WIDTH, requires_grad=True)
    room(2**40, 1)
    with ebb.region(ebb.policies.recompute_all):
        h = w * 2
        y = h.sin()
    with torch.no_grad():
        h.add_(1)

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
