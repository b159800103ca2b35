"""RECOMPUTE_EACH_TIME ahead of backward, and while there is room."""

from __future__ import annotations

import pytest
import torch

import ebb
from ebb import SAVE, Policy
from ebb_tests.exactness import replayed, same_bits
from ebb_tests.programs.ahead import WaitInBackward, counts, room
from ebb_tests.programs.each_time import EACH_TIME, NBYTES, SIZE, held_every
from ebb_tests.replays import replays_ahead


def regions_ahead(policy, limit="1GiB", sines=6):
    """Gradients of five regions whose replays may run ahead, and what those did."""
    x = torch.linspace(0, 1, SIZE, dtype=torch.float64, requires_grad=True)
    found = []

    def step():
        h = x
        for _ in range(5):
            with ebb.region(policy):
                h = WaitInBackward.apply(h)
                for _ in range(sines):
                    h = h.sin()
        found.append(torch.autograd.grad(h.sum(), x)[0])

    with replays_ahead(limit=limit):
        did = counts(step)
        assert ebb.stats()["ahead"]["bytes"] == 0
    total = ebb.stats()["total"]
    return found[0], did | {name: total[name] for name in ("ops_replayed", "ops_replayed_ahead")}


def test_a_look_ahead_leaves_them_to_backward():
    found, did = regions_ahead(EACH_TIME)

    assert same_bits(found, regions_ahead(Policy(default=SAVE))[0])
    assert did["regions_in_time"] == 0
    assert did["regions_held"] == 0
    assert did["regions_stopped"] == 4
    assert did["failures"] == 0
    assert did["ops_replayed"] == 5 * sum(range(6))


@pytest.mark.parametrize("room", [2, 3, 4, 100])
def test_a_look_ahead_makes_others_of_them_if_there_is_room(room):
    """In passing: for the two that are held, and one more."""
    found, did = regions_ahead(held_every(5), limit=room * NBYTES, sines=11)

    assert same_bits(found, regions_ahead(Policy(default=SAVE), sines=11)[0])
    assert did["regions_stopped"] == 4
    assert did["ops_replayed_ahead"] <= 4 * 10
    assert (did["ops_replayed_ahead"] == 4 * 10) == (room > 2)


def test_they_are_kept_while_there_is_room():
    x = torch.linspace(0, 1, SIZE, dtype=torch.float64, requires_grad=True)
    before = replayed()
    with room():
        with ebb.region(EACH_TIME):
            loss = x.sin().sin().sin().sum()
        found = torch.autograd.grad(loss, x)[0]

    assert replayed() == before
    assert same_bits(found, torch.autograd.grad(x.sin().sin().sin().sum(), x)[0])


def test_they_are_given_up_when_there_is_none():
    x = torch.linspace(0, 1, SIZE, dtype=torch.float64, requires_grad=True)
    with room(limit=1 << 20, used=1 << 30):
        with ebb.region(EACH_TIME):
            h = x.sin().sin().sin().sin()
        with ebb.region(EACH_TIME):
            loss = h.sin().sum()
        del h
        before = replayed()
        found = torch.autograd.grad(loss, x)[0]
        count = replayed() - before

    assert count == sum(range(4))
    assert same_bits(found, torch.autograd.grad(x.sin().sin().sin().sin().sin().sum(), x)[0])
