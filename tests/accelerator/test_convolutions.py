"""Convolutions that are chosen by timing, as cuDNN's are with torch.backends.cudnn.benchmark: see
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


def rows_of_a_block(device, policy):
    """How the report tells of a convolution between other operators; gradients are eager's."""
    x = torch.randn(2, 3, 8, 8).to(device).requires_grad_()
    weight = torch.randn(4, 3, 3, 3).to(device).requires_grad_()

    def gradients():
        return torch.autograd.grad(F.conv2d(x.sin(), weight).exp().sum(), (x, weight))

    expected = gradients()
    with ebb.record_reports():
        with ebb.region(policy):
            loss = F.conv2d(x.sin(), weight).exp().sum()
        found = torch.autograd.grad(loss, (x, weight))
    assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(expected, found, strict=True))
    return [row for row in ebb.report().rows if row.op.startswith(CONVOLUTION)]


@pytest.mark.parametrize("forced", [False, True])
@pytest.mark.parametrize("timed", [False, True])
def test_what_is_chosen_by_timing_is_kept(device, times, timed, forced):
    times(timed)
    policy = ebb.Policy([ebb.Rule(CONVOLUTION, ebb.RECOMPUTE, force=True)]) if forced else None

    (row,) = rows_of_a_block(device, policy)

    kept = timed and not forced
    assert ("chosen by timing" in row.reason) == kept
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
