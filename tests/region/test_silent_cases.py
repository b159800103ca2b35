"""The silent cases of docs/limits.md that need no device: each is silent, and verify mode finds it
where the page says so."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import pytest
import torch

import ebb

PAGE = (Path(__file__).parents[2] / "docs/limits.md").read_text()
ROWS = re.findall(r"^\| ([A-Z\[].*?) \| (.*?) \| (.*?) \| (.*?) \|$", PAGE, re.M)


def writes_through_numpy(w, x, region):
    with region():
        h = (x @ w).relu()
        h.detach().numpy()[:] = 2
        return (h * h).sin().sum()


def writes_to_shared_memory(w, x, region):
    with region():
        h = (x @ w).sin()
        torch.from_dlpack(h.detach()).mul_(2)
        return (h * h).sin().sum()


def writes_a_saved_result_without_a_new_version(w, x, region):
    with region():
        h = (x @ w).sin()
        loss = h.exp().sum() + (h * h).sum()
    h.data[0, 1] = 5
    del h
    return loss


def replaces_the_storage(w, x, region):
    with region():
        h = (x @ w).sin()
        loss = (h * h).sum()
    h.data = torch.ones_like(h)
    return loss


def refills_the_storage(w, x, region):
    with region():
        h = (x @ w).sin()
        loss = (h * h).sin().sum()
    size = h.untyped_storage().nbytes()
    h.untyped_storage().resize_(0)
    h.untyped_storage().resize_(size)
    h.data.fill_(1)
    return loss


FOUND_BY_VERIFY = (
    writes_through_numpy,
    writes_to_shared_memory,
    writes_a_saved_result_without_a_new_version,
)
FOUND_BY_NOTHING = replaces_the_storage, refills_the_storage


def gradient(program, region):
    w = torch.linspace(-1, 1, 4096).view(64, 64).requires_grad_()
    x = torch.linspace(-2, 2, 4096).view(64, 64)
    program(w, x, region).backward()
    return w.grad


@pytest.mark.parametrize("program", FOUND_BY_VERIFY + FOUND_BY_NOTHING)
def test_gradient_differs_without_an_error(program):
    eager = gradient(program, contextlib.nullcontext)

    assert not torch.equal(gradient(program, ebb.region), eager)


@pytest.mark.parametrize("program", FOUND_BY_VERIFY)
def test_verify_mode_raises(program):
    with ebb.verify(), pytest.raises(ebb.ReplayMismatch, match="differs from the forward"):
        gradient(program, ebb.region)


@pytest.mark.parametrize("program", FOUND_BY_NOTHING)
def test_verify_mode_finds_nothing(program):
    with ebb.verify():
        found = gradient(program, ebb.region)

    assert not torch.equal(found, gradient(program, contextlib.nullcontext))


def test_page_has_at_most_eight_silent_cases():
    detected = [found for _, _, found, _ in ROWS]

    assert 1 <= len(ROWS) <= 8
    assert sum(found == "nothing" for found in detected) == 1
    assert all("verify mode" in found for found in detected[:2])
