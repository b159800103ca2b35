"""Rule 3: a whole overwrite does not need what was there."""

from __future__ import annotations

import pytest
import torch

import ebb
from ebb_tests.exactness import exact, replayed

pytestmark = pytest.mark.engines("exactness", "device", "checked")


@pytest.mark.parametrize(
    "overwrite",
    [
        lambda t, x: t.fill_(2.0),
        lambda t, x: t.zero_(),
        lambda t, x: t.copy_(x),
        lambda t, x: t.normal_(),
        lambda t, x: t.bernoulli_(0.5),
        lambda t, x: t.uniform_(),
        lambda t, x: t.random_(5),
        lambda t, x: t.exponential_(),
        lambda t, x: t.geometric_(0.5),
        lambda t, x: t.log_normal_(),
        lambda t, x: t.cauchy_(),
    ],
)
@exact((3, 4))
def test_every_overwrite_in_the_table(x, overwrite):
    h = torch.empty_like(x)
    with torch.no_grad():
        overwrite(h, x)
    return (x * h).sin() * (h + x).exp()


@pytest.mark.replays
def test_an_overwrite_cuts_the_chain():
    def program(x):
        with torch.no_grad():
            h = (x * 2).exp().sin()  # three ops that nothing needs any more
            h.copy_(x)
        return h * x

    x = torch.randn(3, requires_grad=True)
    with ebb.region():
        loss = program(x).sum()
    loss.backward()

    assert replayed() == 1


@exact((3, 4))
def test_out_arguments(x):
    with torch.no_grad():
        exact = torch.empty(3, 4, dtype=x.dtype)
        torch.exp(x, out=exact)
        grown = torch.empty(0, dtype=x.dtype)
        torch.mul(exact, x, out=grown)
        torch.add(grown, x, out=grown)
        values, indices = torch.empty(4, dtype=x.dtype), torch.empty(4, dtype=torch.long)
        torch.max(grown, 0, out=(values, indices))
    return (x * exact).sin() * grown * values + x[indices % 3, 0].exp()


@exact((3, 4))
def test_out_argument_that_covers_a_part_keeps_the_rest(x):
    with torch.no_grad():
        h = x * 2
        torch.exp(x[0], out=h[1])
    return (h * x).sin()
