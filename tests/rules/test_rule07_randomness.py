"""Rule 7: a replayed draw is the same draw, and the outer state goes on as in eager."""

from __future__ import annotations

import contextlib
import threading

import pytest
import torch
from exactness import POLICIES, assert_exact, leaves
from torch import nn
from torch.nn import functional as F

import ebb


def test_dropout_before_and_after_other_random_ops():
    def program(x):
        h = F.dropout(x * 2, 0.5)
        noise = torch.randn_like(h)
        h = F.dropout(h * noise, 0.3) + torch.rand(h.shape, dtype=h.dtype)
        return F.alpha_dropout(h, 0.2, training=True).exp() * F.dropout1d(h, 0.5).sin()

    assert_exact(program, leaves((6, 6)))


def test_every_kind_of_random_op():
    def program(x):
        p = torch.sigmoid(x)
        with torch.no_grad():
            draws = [
                torch.bernoulli(p),
                torch.normal(x, p),
                torch.poisson(p * 5),
                torch.multinomial(p, 6, replacement=True).to(x.dtype),
                torch.randperm(6).to(x.dtype),
                torch.randint(0, 9, (6,)).to(x.dtype),
                torch.randint_like(x, 5),
                torch.empty_like(x).uniform_(),
                torch._standard_gamma(p + 1),
                torch.binomial(torch.full_like(p, 9), p),
            ]
        return [(x * d).sin().sum() for d in draws]

    assert_exact(program, leaves((6, 6)))


def test_explicit_generators():
    def run(policy):
        generator = torch.Generator().manual_seed(5)
        x = leaves((50,))[0]
        with ebb.region(policy):
            mask = torch.empty(50, dtype=x.dtype).bernoulli_(0.5, generator=generator)
            noise = torch.randn(50, generator=generator, dtype=x.dtype)
            loss = ((x * mask).exp() * (x + noise).sin()).sum()
        loss.backward()
        return x.grad, torch.rand(3, generator=generator)

    for a, e in zip(run(ebb.policies.recompute_all), run(ebb.policies.save_all), strict=True):
        assert torch.equal(a, e)


def test_generator_moved_on_between_forward_and_backward():
    def moved(*_):
        torch.rand(100)

    assert_exact(lambda x: F.dropout(x * 2, 0.5).exp(), leaves((50,)), after=moved)


def test_unmarked_custom_op_that_draws():
    @torch.library.custom_op("ebb_test::noisy", mutates_args=())
    def noisy(x: torch.Tensor) -> torch.Tensor:
        return x * torch.rand_like(x)

    def backward(ctx, grad):
        return grad

    noisy.register_autograd(backward)

    def program(x):
        return noisy(x * 2).exp() * noisy(x).sin()

    assert_exact(program, leaves((5,)))
    x = leaves((5,))[0]
    torch.manual_seed(0)
    expected = torch.autograd.grad(program(x).sum(), x)[0]
    torch.manual_seed(0)
    with ebb.region(ebb.Policy({"ebb_test::noisy": ebb.RECOMPUTE})):
        loss = program(x).sum()
    assert torch.equal(torch.autograd.grad(loss, x)[0], expected)


def test_threads_that_draw_at_once_keep_their_masks():
    failures = []

    def train(seed):
        x = torch.ones(200, 50, requires_grad=True)
        for _ in range(30):
            x.grad = None
            with ebb.region():
                h = F.dropout(x * 1.0, 0.5)
                loss = (h * h).sum()
                mask = h.detach().clone()
            loss.backward()
            if not torch.equal(x.grad, 2 * mask * 2 * (mask > 0)):
                failures.append(seed)

    threads = [threading.Thread(target=train, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert not failures


def test_recurrent_network_with_dropout():
    lstm = nn.LSTM(4, 6, num_layers=2, dropout=0.5).double()

    def program(x):
        out, (h, c) = lstm(x)
        return out.exp(), h.sin(), c

    assert_exact(program, leaves((5, 2, 4)))


@pytest.mark.on_cpu("the test device's kernels raise when they run")
def test_an_operator_that_raises_after_it_has_drawn():
    """The generator is as far on as in eager."""

    def state(region):
        torch.manual_seed(1)
        x = torch.randn(2, 3, 4)
        with region, pytest.raises(RuntimeError, match="more than one element"):
            nn.functional.rrelu(x.mul(1)[:1].expand(2, 3, 4), training=True, inplace=True)
        return torch.get_rng_state()

    expected = state(contextlib.nullcontext())
    for policy in POLICIES.values():
        assert torch.equal(state(ebb.region(policy)), expected)
    torch.manual_seed(1)
    torch.randn(2, 3, 4)
    assert not torch.equal(expected, torch.get_rng_state())  # it did draw
