"""What the program has dropped, and only ebb holds, counts as kept."""

from __future__ import annotations

import pytest
import torch
from memory_use import allocations
from reporting import no_reports_yet  # noqa: F401

import ebb
from ebb._report.report import reports

NBYTES = 64 * 64 * 4
x = torch.randn(64, 64, requires_grad=True)
quantised = torch.randint(-9, 9, (64, 64), dtype=torch.int8)
kept = []


def region(name="block"):
    return ebb.region(ebb.policies.recompute_all, name)


def blocks():
    """What one hands on to the next."""
    h = x
    for i in range(4):
        with region(f"block {i}"):
            h = h.neg().sin().exp().neg()
    with region("loss"):
        return h.exp().sum()


def weight_for_one_call():
    """Autograd saves it."""

    def product(weight):
        with region():
            return (x @ weight).sin().sum()

    return product(quantised.float())


def made_in_the_region():
    with region():
        return (x + torch.randn(64, 64)).sin().sum()


def read_by_several_regions():
    memory = x.detach().neg()
    h = x
    for i in range(3):
        with region(f"block {i}"):
            h = (h + memory).sin()
            h = h.sum() if i == 2 else h.neg()
    return h


def handed_on_and_needed_by_its_maker():
    with region("maker"):
        h = x.neg().relu()
    with region("user"):
        return h.neg().sin().sum()


def held_by_the_program():
    kept.append(x.detach() * 2)
    with region():
        return (x + kept[-1]).sin().sum()


# By how many storages only ebb holds.
PROGRAMS = {
    blocks: 4,
    weight_for_one_call: 1,
    made_in_the_region: 1,
    read_by_several_regions: 3,  # two that are handed on
    handed_on_and_needed_by_its_maker: 1,
    held_by_the_program: 0,
}


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_what_only_ebb_holds_is_kept(program):
    ebb.reset_stats()
    kept.clear()
    losses = []
    with ebb.record_reports():
        taken = sum(allocations(lambda: losses.append(program())))
        (during,) = (one for one in reports() if one.rows)
        losses.pop().backward()
    report = ebb.report()

    elsewhere = sum(one.nbytes for one in kept)
    assert report.held == taken - elsewhere
    assert report.peak_held >= taken - elsewhere - 4  # the result
    assert ebb.stats()["total"]["bytes_from_outside"] == PROGRAMS[program] * NBYTES
    assert report.timeline[-1][1:] == (0, 0)
    if program is not weight_for_one_call:  # a tensor that autograd saved; seen when it is freed
        assert during.held == report.held
        assert during.totals == report.totals


def test_it_says_why():
    with ebb.record_reports():
        blocks().backward()
    ours = {row.region: row for row in ebb.report().rows if row.fate == "kept"}
    assert set(ours) == {f"block {i}" for i in range(4)}
    assert {row.op for row in ours.values()} == {"aten::neg.default"}
    assert {row.reason for row in ours.values()} == {
        "needed by another region's backward, now referenced only by ebb"
    }

    for program, reason in (
        (weight_for_one_call, "made outside of the region, now referenced only by ebb"),
        (made_in_the_region, "it wrote to a tensor from outside of the region"),
    ):
        with ebb.record_reports():
            program().backward()
        assert [row.reason for row in ebb.report().rows if row.fate == "kept"] == [reason]


def test_a_graph_that_is_dropped_without_backward():
    ebb.reset_stats()
    loss = blocks()
    assert ebb.stats()["total"]["bytes_from_outside"] == 0
    del loss
    assert ebb.stats()["total"]["bytes_from_outside"] == 4 * NBYTES
    with torch.no_grad():  # nothing is needed, so nothing more counts
        blocks()
    assert ebb.stats()["total"]["bytes_from_outside"] == 4 * NBYTES
