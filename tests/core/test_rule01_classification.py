"""Rule 1: an op is classified once, from its schema; view ops need no recipe."""

from __future__ import annotations

import pytest
import torch

import ebb
from ebb_tests.exactness import exact

pytestmark = pytest.mark.engines("exactness", "device", "checked")


def test_view_ops_are_not_recorded():
    x = torch.randn(4, 4, requires_grad=True)

    with ebb.region():
        x.t().t().view(2, 8).unsqueeze(0).expand(3, 2, 8).transpose(1, 2).detach()

    assert ebb.stats()["total"]["ops_recorded"] == 0


def test_ops_without_tensor_results_are_not_recorded():
    x = torch.ones(3)

    with ebb.region():
        assert x.sum().item() == 3.0
        assert torch.equal(x, x)

    assert ebb.stats()["total"]["ops_recorded"] == 1  # sum


@exact((4, 5))
def test_views_of_every_kind_are_rebuilt_by_geometry(x):
    h = x * 2
    pieces = (
        h.t()[1:, ::2],
        h.as_strided((2, 2), (1, 5), 3),
        h.diagonal(),
        h[None].expand(2, 4, 5),
    )
    return [(p * p.detach().sin()).sum() for p in pieces]


@exact((3, 4))
def test_lazily_conjugated_and_negated_views_are_rebuilt(x):
    h = torch.complex(x, x + 1) * 2
    return (h.conj() * h).real.sum(), (h.conj().imag.exp() * 2).sum()


@exact((3,))
def test_wrapped_numbers_keep_their_rank_in_type_promotion(x):
    scalar = x.sum().to(torch.float32)
    return torch.mul(scalar, 2.5).exp() * torch.mul(scalar, 3).sin()


@exact((3,), (0, 4))
def test_zero_dimensional_and_empty_tensors(x, e):
    return (x.sum().exp() * x.mean().sin()), (e * 2).exp().sum() + x.sum().tanh()
