"""Rule 11: results of one op share a recipe; aliases share a value; lists keep their shape."""

from __future__ import annotations

import pytest
import torch

import ebb
from ebb_tests.exactness import exact, replayed

pytestmark = pytest.mark.engines("exactness", "device", "checked")


@exact((4, 4))
def test_several_results_are_replayed_together(x):
    values, indices = (x * 2).max(0)
    return (values.exp() * x[indices].sin().sum()).sum()


@exact((4, 3, 3), (2, 3, 3))
def test_lists_in_and_out(x, y):
    parts = torch.split(x * 2, 2)
    h = torch.cat([*parts[::-1], y * 3])
    index = torch.tensor([0, 2])
    picked = h[index, :, None, index]  # index takes a list with undefined tensors
    lower = torch.meshgrid(h[0, :, 0], h[1, :, 1], indexing="ij")
    return picked.exp(), torch.stack(lower).sin(), torch.einsum("ijk,ijk->i", h, h.exp())


@exact((3,), (4,))
def test_foreach_ops_with_results(x, y):
    a, b = torch._foreach_mul([x * 1, y * 1], 2.0)
    c, d = torch._foreach_exp([a, b])
    return c.sin() * a, d.sin() * b


@exact((3, 4), (4,))
def test_optional_arguments(x, w):
    plain = torch.nn.functional.layer_norm(x * 2, (4,))
    weighted = torch.nn.functional.layer_norm(x * 2, (4,), w, None)
    return plain.exp() * weighted.sin()


@exact((3, 4))
def test_result_that_aliases_an_argument_is_the_same_value(x):
    h = x * 2
    v = torch.ops.aten._unsafe_view(h, [12])
    h.add_(1)
    return v.exp() * 2


def test_an_op_with_many_results_runs_once_per_backward():
    x = torch.randn(4, 6, requires_grad=True)
    with ebb.region():
        u, s, v = torch.linalg.svd(x * 2, full_matrices=False)
        loss = u.exp().sum() + s.exp().sum() + v.exp().sum()
    ebb.reset_stats()
    loss.backward()

    assert replayed() <= 5  # mul, svd and three exp


def test_no_op_is_replayed_twice_though_its_result_is_dropped():
    """h has no handle: nothing saves it. Replaying it for each consumer would be quadratic."""
    x = torch.randn(4, requires_grad=True)
    length = 200
    with ebb.region():
        h, total = x, 0
        for _ in range(length):
            h = h + 1
            total = total + h.exp().sum()
    recorded = ebb.stats()["total"]["ops_recorded"]
    total.backward()

    assert replayed() <= recorded
