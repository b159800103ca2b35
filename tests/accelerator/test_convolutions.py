"""Convolutions whose kernels are not chosen by the arguments alone, as cuDNN's are: see
Note [Kernels chosen by timing]."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

import ebb

CONVOLUTION = "aten::convolution"


@pytest.fixture
def times(device, monkeypatch):
    """Switches the timing on or off. The device's convolution is the CPU's."""
    library = torch.library.Library("aten", "IMPL")

    def convolution(x, weight, bias, *rest):
        bias = None if bias is None else bias.cpu()
        return torch.convolution(x.cpu(), weight.cpu(), bias, *rest).to(device)

    def backward(grad, x, weight, *rest):
        *rest, mask = rest
        found = torch.ops.aten.convolution_backward(
            grad.cpu(), x.cpu(), weight.cpu(), None, *rest, mask
        )
        return tuple(None if part is None else part.to(device) for part in found)

    library.impl("convolution_overrideable", convolution, "PrivateUse1")
    library.impl("convolution_backward_overrideable", backward, "PrivateUse1")
    yield lambda value: monkeypatch.setattr(torch.backends.cudnn, "benchmark", value)
    library._destroy()


class Block:
    """A convolution between other operators."""

    def __init__(self, device, policy=None):
        self.x = torch.randn(2, 3, 8, 8).to(device).requires_grad_()
        self.weight = torch.randn(4, 3, 3, 3).to(device).requires_grad_()
        self.policy = policy

    def eager(self):
        return F.conv2d(self.x.sin(), self.weight).exp().sum()

    def forward(self):
        with ebb.region(self.policy, "stem"):
            return self.eager()

    def gradients(self, loss):
        return torch.autograd.grad(loss, (self.x, self.weight))


def rows_of_a_block(device, policy):
    """How the report tells of the convolution; gradients are eager's."""
    block = Block(device, policy)
    expected = block.gradients(block.eager())
    with ebb.record_reports():
        found = block.gradients(block.forward())
    assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(expected, found, strict=True))
    return [row for row in ebb.report().rows if row.op.startswith(CONVOLUTION)]


@pytest.mark.parametrize("forced", [False, True])
@pytest.mark.parametrize("timed", [False, True])
def test_what_is_chosen_by_timing_is_kept(device, times, timed, forced):
    times(timed)
    policy = ebb.Policy([ebb.Rule(CONVOLUTION, ebb.RECOMPUTE, force=True)]) if forced else None

    (row,) = rows_of_a_block(device, policy)

    kept = timed and not forced
    assert ("the algorithm by timing" in row.reason) == kept
    assert row.replays == (0 if kept else 1)
    assert (row.fate == "kept") == kept


def test_without_cudnn_nothing_is_timed(device, times, monkeypatch):
    times(True)
    monkeypatch.setattr(torch.backends.cudnn, "enabled", False)

    (row,) = rows_of_a_block(device, None)

    assert "timing" not in row.reason


def test_on_the_cpu_nothing_is_timed(times):
    times(True)

    (row,) = rows_of_a_block(torch.device("cpu"), None)

    assert "timing" not in row.reason
