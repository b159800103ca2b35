"""Activations from outside of a region count as kept, with the reason."""

from __future__ import annotations

import pytest
import torch

import ebb
from ebb._report.report import reports
from ebb_tests.memory_use import allocations
from ebb_tests.one_step_report import no_reports_yet  # noqa: F401

x = torch.randn(64, 64, requires_grad=True)
kept = []


def region(name="block"):
    return ebb.region(ebb.policies.recompute_all, name)


def blocks():
    """Each region reads the result of the one before."""
    h = x
    for i in range(4):
        with region(f"block {i}"):
            h = h.neg().sin().exp().neg()
    with region("loss"):
        return h.exp().sum()


def made_outside():
    h = x.neg()
    with region():
        return h.sin().exp().sum()


def read_by_several_regions():
    memory = x.neg()
    h = x
    for i in range(3):
        with region(f"block {i}"):
            h = (h + memory).sin()
            h = h.sum() if i == 2 else h.neg()
    return h


def read_by_another_region_and_by_its_own_backward():
    with region("maker"):
        h = x.neg().relu()
    with region("user"):
        return h.neg().sin().sum()


def held_by_the_program():
    kept.append(x.detach() * 2)
    with region():
        return (x + kept[-1]).sin().sum()


PROGRAMS = [
    blocks,
    made_outside,
    read_by_several_regions,
    read_by_another_region_and_by_its_own_backward,
    held_by_the_program,
]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_inputs_that_backward_needs_are_kept(program):
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
    assert report.timeline[-1][1:] == (0, 0)
    assert during.held == report.held
    assert during.totals == report.totals


def test_kept_inputs_have_a_reason():
    with ebb.record_reports():
        blocks().backward()
    ours = {row.region: row for row in ebb.report().rows if row.fate == "kept"}
    assert set(ours) == {f"block {i}" for i in range(4)}
    assert {row.op for row in ours.values()} == {"aten::neg.default"}
    assert {row.reason for row in ours.values()} == {"needed by another region's backward"}

    with ebb.record_reports():
        made_outside().backward()
    assert [row.reason for row in ebb.report().rows if row.fate == "kept"] == [
        "made outside of the region, and needed by its backward"
    ]
