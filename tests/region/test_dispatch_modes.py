"""What ebb does for backward by itself is seen by no dispatch mode of the program's."""

from __future__ import annotations

import contextlib

import pytest
import torch

import ebb
from ebb import _testing
from ebb_tests.engines import disk_tier, offload_settings
from ebb_tests.programs.paged import Keep, Seen
from ebb_tests.stand_ins import fake_accelerator


@pytest.fixture(params=["nowhere", "on the host", "on disk"])
def policy(request):
    """Of values that are there until backward."""
    tiers = {"on the host": fake_accelerator, "on disk": disk_tier}
    with tiers.get(request.param, contextlib.nullcontext)(), offload_settings(in_flight_bytes=0):
        yield ebb.Policy(default=ebb.OFFLOAD if request.param in tiers else ebb.RECOMPUTE)


def test_no_mode_sees_what_is_allocated_and_copied_for_backward(policy):
    x = torch.linspace(0, 1, 16).requires_grad_()
    with ebb.region(policy):
        h = x * 2
        expected = h.detach().clone()
        y = Keep.apply(h)
        ctx = Keep.last
        z = h.exp().sin()  # what is recomputed for it reads the same bytes
    del h
    _testing.drain_offload()
    with Seen() as seen:
        (saved,) = ctx.saved_tensors
    Keep.last = None

    assert y.requires_grad
    assert torch.equal(saved, expected)
    assert torch.equal(torch.autograd.grad(z.sum(), x)[0], 2 * (2 * x).exp() * (2 * x).exp().cos())
    assert {*seen.names} <= {"aten::detach"}  # of autograd
