"""Verify mode where storages are kept alive for the comparison: see Note [Verify mode]."""

from __future__ import annotations

import ctypes

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F

import ebb
from ebb_tests.programs.paged import Keep, Seen


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("mode", ["raise", "demote"])
def test_workspaces_are_not_compared(mode, device):
    """What a kernel leaves out of a workspace is something else at each call."""
    logits = torch.randn(12, 2, 6).log_softmax(-1).to(device).requires_grad_()
    targets = torch.randint(1, 6, (2, 4)).to(device)

    def loss():
        return F.ctc_loss(logits, targets, (12, 7), (4, 2)) * 2

    expected = torch.autograd.grad(loss(), logits)[0]
    with ebb.verify(mode):
        with ebb.region():
            ours = loss()
        found = torch.autograd.grad(ours, logits)[0]

    assert torch.equal(found.cpu(), expected.cpu())


def test_a_write_that_torch_does_not_see_is_found(device):
    x = torch.randn(4, 4).to(device).requires_grad_()
    with ebb.verify():
        with ebb.region():
            h = x * 2
            y = h.exp()
            torch.accelerator.synchronize()
            ctypes.memset(torch.ops.late.kernel_address(y), 0, 64)
        with pytest.raises(ebb.ReplayMismatch, match=r"aten::exp"):
            torch.autograd.grad(y.sum(), x)


def test_a_write_to_an_input_that_torch_does_not_see_is_found(device):
    x = torch.randn(4).to(device).requires_grad_()
    w = torch.randn(4).to(device)
    with ebb.verify():
        with ebb.region():
            y = (x * w.sin()).exp()
        torch.accelerator.synchronize()
        ctypes.memset(torch.ops.late.kernel_address(w), 0, 4)
        with pytest.raises(ebb.ReplayMismatch, match=r"aten::sin.*input 'self' has changed"):
            torch.autograd.grad(y.sum(), x)


def test_no_mode_sees_what_is_read_to_compare(device):
    x = torch.randn(4).to(device).requires_grad_()
    w = torch.randn(4).to(device)
    with ebb.verify():
        with ebb.region():
            y = Keep.apply(x * w.sin())
            ctx = Keep.last
        with Seen() as seen:
            (saved,) = ctx.saved_tensors
    Keep.last = None

    assert y.requires_grad
    assert torch.equal(saved.cpu(), (x * w.sin()).cpu())
    assert {*seen.names} <= {"aten::detach"}  # of autograd


def test_what_is_dropped_lives_as_long_as_what_it_is_compared_with(device):
    """It is not poisoned, so the storage itself is what a replay is compared with."""
    x = torch.randn(4).to(device).requires_grad_()
    with ebb.verify(), ebb.region():
        h = x * 2
        dropped = StorageWeakRef(h.untyped_storage())
        loss = h.sin().sum()
        del h
    assert not dropped.expired()
    loss.backward()
    del loss
    assert dropped.expired()
