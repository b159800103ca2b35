"""Rule 2: a write makes a new value of the same storage; replay works on a private copy."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import relu

import ebb
from ebb_tests.exactness import exact, replayed

pytestmark = pytest.mark.engines("exactness", "device", "checked")


@exact((3, 4))
def test_chain_of_inplace_ops(x):
    h = x * 2
    h.mul_(3).add_(1).sin_().neg_()
    return h.exp().sin()


@exact((3, 4))
def test_state_before_the_write_is_what_earlier_ops_saw(x):
    h = x * 2
    before = h.sum() + (h + 1).exp().sum()  # add saves nothing; exp saves its result
    h.mul_(5)
    return before + h.exp().sum()


@exact((3, 4))
def test_writes_through_views(x):
    h = x * 1
    h[1:].mul_(2)
    h.t()[0].add_(3)
    h.view(-1)[::3].copy_(h.view(-1)[1::3])
    return h.sin() * h.exp()


@exact((4, 4))
def test_the_written_argument_is_read_too(x):
    with torch.no_grad():
        h = x * 1
        h.add_(h)
        h.mul_(h)
        h.addmm_(x, x)
        torch.add(h, x, out=h)
    return (x * h).sin() * h.exp()


@exact((3, 4))
def test_two_views_written_by_one_foreach_op(x):
    h = x * 2
    torch._foreach_mul_([h[0], h[1], h[2]], 3.0)
    torch._foreach_add_([h[0], h[1]], [h[1].clone(), h[2].clone()])
    return h.sin().exp()


@exact((3, 4))
def test_a_taken_over_buffer_is_not_used_twice(x):
    h = x * 2
    a = h.exp()
    with torch.no_grad():
        kept = a.detach().clone()
        kept.mul_(2)
        other = kept + 1
        kept.add_(1)
    return (a * kept).sin() * other


def test_inplace_relu_after_a_saved_product_is_kept_not_recomputed():
    w = torch.randn(4, 4, requires_grad=True)
    x = torch.randn(2, 4)

    with ebb.region(ebb.policies.save_matmuls):
        loss = relu(x @ w, inplace=True).sum()
    loss.backward()

    assert replayed() == 0
