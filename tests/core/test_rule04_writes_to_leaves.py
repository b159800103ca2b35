"""Rule 4: writing to a leaf happens once; old bytes that recipes need are copied first."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ebb
from ebb_tests.exactness import assert_exact, exact, leaves, like_eager

pytestmark = pytest.mark.engines("exactness", "device", "checked")


class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.ones(3, dtype=torch.float64))

    def forward(self, x):
        before = (x + self.seen).exp()
        self.seen.add_(1)
        after = (x + self.seen).exp()
        self.seen.mul_(2)
        return before + after


@like_eager()
def test_buffer_is_written_once_and_the_replay_sees_the_old_state(region):
    module, x = Counter(), leaves((3,))[0]
    with region:
        loss = module(x).sum()
    return torch.autograd.grad(loss, x)[0], module.seen


@pytest.mark.not_in_verify_mode(
    "there it keeps storages alive, so recipes live longer", on_device=True
)
@pytest.mark.replays
def test_copy_is_made_only_when_a_recipe_needs_the_old_bytes():
    buffer = torch.ones(4)
    x = torch.randn(4, requires_grad=True)

    with ebb.region():
        buffer.add_(1)
        out = ((x + buffer).exp() * 2).sum()
        del out  # with it go the handles and the recipes that read the buffer
        buffer.add_(1)

    assert torch.equal(buffer, torch.full((4,), 3.0))
    assert ebb.stats()["total"]["bytes_copied"] == 0


def test_bytes_are_copied_before_the_write_that_would_lose_them():
    buffer = torch.ones(4)
    x = torch.randn(4, requires_grad=True)

    with ebb.region():
        loss = ((x + buffer).exp() * 2).sum()
        buffer.add_(1)
    loss.backward()

    assert ebb.stats()["total"]["bytes_copied"] == 16
    assert torch.equal(x.grad, 2 * (x + 1).exp())


@exact((3,))
def test_parameter_updated_under_no_grad_inside_the_region(w):
    h = (w + 1).exp()
    buffer = w.detach().clone()
    with torch.no_grad():
        for _ in range(3):
            buffer.add_(0.5)
    return h * buffer


def test_write_to_an_input_that_needs_no_grad():
    mask = torch.ones(3, dtype=torch.float64)

    def program(x, m):
        a = (x + m).exp()
        m.mul_(0.5)
        return a * 2 + (x + m).exp()

    assert_exact(program, [*leaves((3,)), mask])


def test_key_value_cache_filled_slice_by_slice():
    cache = torch.zeros(4, 3, dtype=torch.float64)

    def program(x, cache):
        total = 0
        for position in range(4):
            with torch.no_grad():
                cache[position].copy_(x[position] * 2)
            total = total + (x * cache[: position + 1].sum(0)).exp().sum()
        return total

    assert_exact(program, [*leaves((4, 3)), cache])
