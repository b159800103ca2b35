"""What ebb assumes of torch's internals (src/torch_seams): a test fails where torch has changed."""

from __future__ import annotations

import contextlib

import pytest
import torch

import ebb
from ebb import _testing


def test_key_is_between_autograd_and_kernels():
    above = ["Python", "Fake", "Functionalize", "Conjugate", "Negative", "ADInplaceOrView"]
    above += ["AutocastCPU", "AutogradCPU", "FuncTorchBatched"]
    below = ["CPU", "CUDA", "PrivateUse1", "BackendSelect"]

    assert _testing.run_after_interception(above) == [False] * len(above)
    assert _testing.run_after_interception(below[:3]) == [True] * 3


def test_region_sees_an_op_once_below_autograd_and_autocast():
    x = torch.randn(4, 4, requires_grad=True)
    with ebb.region(ebb.policies.recompute_all), torch.autocast("cpu", torch.bfloat16):
        y = x.sin().exp()
    y.sum().backward()

    assert ebb.stats()["total"]["ops_seen"] == 2


def test_engine_makes_the_hooks():
    x = torch.randn(4, requires_grad=True)
    saved = []
    before = ebb.stats()["live_handles"]
    with ebb.region(ebb.policies.recompute_all):
        y = x.sin()
        assert ebb.stats()["live_handles"] > before
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            z = y.exp()  # hooks of the program are in front of ebb's

    assert len(saved) == 1
    z.sum().backward()
    assert torch.equal(x.grad, x.detach().cos() * x.detach().sin().exp())


def test_counts_of_owners_are_exact():
    assert _testing.counts_of_owners() == [True] * 6


def test_storage_gets_other_memory():
    message, read = _testing.emptied_and_filled(torch.zeros(3))

    assert "nothing is here" in message
    assert torch.equal(read, torch.ones(3))


def test_generated_functions_are_told_from_others():
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * 2

    x = torch.randn(3, requires_grad=True)

    assert _testing.is_generated(x * 2)
    assert not _testing.is_generated(Double.apply(x))


@pytest.mark.parametrize("policy", ["recompute_all", "save_all"])
def test_exactness_through_all_seams(policy):
    """In-place writes, views and a custom function in one program."""

    def step(x):
        h = (x @ x).relu_() + 1
        h[0].mul_(2)
        return torch.nn.functional.dropout(h, 0.5).cumsum(0).square().sum()

    def gradient(around):
        torch.manual_seed(1)
        x = torch.arange(16.0).reshape(4, 4).div(7).requires_grad_()
        with around:
            loss = step(x)
        loss.backward()
        return x.grad

    expected = gradient(contextlib.nullcontext())
    assert torch.equal(gradient(ebb.region(getattr(ebb.policies, policy))), expected)
