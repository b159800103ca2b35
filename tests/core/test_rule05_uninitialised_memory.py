"""Rule 5: memory that a kernel unknown to torch may have filled is no recipe."""

from __future__ import annotations

import ctypes

import pytest
import torch

import ebb
from ebb_tests.exactness import exact
from ebb_tests.memory_use import address_of

pytestmark = pytest.mark.engines("exactness", "device", "checked")


def fill_unseen(t: torch.Tensor) -> None:
    """Writes 0.25, 1.25, ... behind the dispatcher's back, as a raw kernel does."""
    values = (ctypes.c_double * t.numel())(*[i + 0.25 for i in range(t.numel())])
    ctypes.memmove(address_of(t), values, t.numel() * 8)


@pytest.mark.parametrize(
    "factory",
    [
        torch.empty_like,
        torch.zeros_like,
        torch.ones_like,
        lambda x: torch.full((3,), 7.0, dtype=x.dtype),
    ],
)
@exact((3,))
def test_factory_result_filled_by_an_opaque_kernel(x, factory):
    h = factory(x.detach())
    fill_unseen(h)
    return (x * h).exp() + (h + x).sin()


@exact((3,))
def test_opaque_kernel_then_writes_in_place(x):
    h = torch.empty(3, dtype=x.dtype)
    fill_unseen(h)
    h.mul_(2)
    h[1:].add_(1)
    return (x * h).exp()


@exact((4,))
def test_empty_filled_slice_by_slice_stays_kept(x):
    h = torch.empty(4, dtype=x.dtype)
    with torch.no_grad():
        h[:2].copy_(x[:2])
        h[2:].copy_(x[2:])
    return (h * x).exp()


def test_zeros_that_are_written_first_are_recomputed():
    x = torch.randn(64, requires_grad=True)

    with ebb.region():
        h = torch.zeros(64)
        h = h.index_add(0, torch.arange(64), x)
        total = torch.zeros(64)
        total += h
        loss = (total * x).exp().sum()
        held = ebb.stats()
    loss.backward()

    assert held["total"]["bytes_saved"] == 0


@exact((3,))
def test_zeros_accumulated_into(x):
    total = torch.zeros_like(x)
    for i in range(3):
        total += x * i
    out = torch.zeros(3, 2, dtype=x.dtype)
    out[:, 0] = x
    out[:, 1] = total.exp()
    return total.sin() * 2, out.exp()
