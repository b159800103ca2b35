"""A generator that several threads draw from: rule 7, where others draw meanwhile."""

from __future__ import annotations

import contextlib
import threading
from functools import partial

import pytest
import torch

import ebb
from ebb_tests.other_threads import (
    another_thread_draws,
    another_thread_has,
    in_thread,
    run_in_threads,
)
from ebb_tests.stand_ins import kernel

EVERYTHING = ebb.policies.recompute_all


def attention_without_dropout(x):
    return torch.nn.functional.scaled_dot_product_attention(x, x * 2, x * 3)


def chosen_of_many(x):
    return x * torch.multinomial(torch.ones(4_000_000), 2, replacement=True).sum().div(1e6)


def dropped(x):
    return torch.native_dropout(x, 0.5, True)[0]


@pytest.mark.parametrize(
    ("program", "shape"), [(attention_without_dropout, (1, 4, 512, 64)), (chosen_of_many, (8,))]
)
def test_no_number_that_another_thread_draws_meanwhile_is_drawn_again(program, shape):
    """By kernels that take long and draw little, or nothing, or what nobody else does."""
    x = torch.randn(shape, requires_grad=True)
    with another_thread_draws(lambda: True) as draws:
        for _ in range(5):
            with ebb.region(EVERYTHING):
                total = program(x * 2).exp().sin().sum()
            torch.autograd.grad(total, x)
    drawn = torch.cat(draws)

    assert len(drawn.unique()) == len(drawn)


def test_what_a_region_draws_while_another_thread_replays_is_as_in_eager():
    """Replays set the generator that all share, for the operators that take none."""
    x, ones = torch.randn(64, requires_grad=True), torch.ones(64)
    replays, has_drawn = threading.Event(), threading.Event()

    def dropout(x, p, train):
        if threading.current_thread() is backward:
            replays.set()
            has_drawn.wait(0.5)
        mask = torch.rand_like(x) < p
        return x * mask * 2, mask

    with kernel("native_dropout", dropout):
        torch.manual_seed(1)
        backward = threading.Thread(target=lambda: torch.autograd.grad(total, x))
        with ebb.region(EVERYTHING):
            total = dropped(x * 2).exp().sin().sum()
        backward.start()
        assert replays.wait(10)
        with ebb.region(EVERYTHING):
            drawn = dropped(ones)  # waits until the replay is over
        has_drawn.set()
        backward.join()
        after = torch.rand(3)

        torch.manual_seed(1)
        dropped(x)
        assert torch.equal(drawn, dropped(ones))
    assert torch.equal(after, torch.rand(3))


def drawn_from_one_generator(region):
    """Operators that take a generator, and others."""
    torch.manual_seed(1)
    x = torch.ones(300_000, requires_grad=True)
    gradients = []
    for _ in range(30):
        with region:
            mask = torch.bernoulli(torch.full_like(x.detach(), 0.5))
            total = dropped((x * mask).exp()).sin().sum()
        gradients.append(torch.autograd.grad(total, x)[0])
    return [*gradients, torch.rand(3)]


def test_a_generator_is_not_looked_at_while_another_thread_has_its_lock():
    expected = drawn_from_one_generator(contextlib.nullcontext())
    with another_thread_has(torch.default_generator):
        found = drawn_from_one_generator(ebb.region(EVERYTHING))

    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


ONCE_MORE = []  # what kernels of `asks_around` do when they run again


@torch.library.custom_op("ebb_test::asks_around", mutates_args=())
def asks_around(x: torch.Tensor) -> torch.Tensor:
    for act in ONCE_MORE:
        in_thread(act)
    return x * 2


asks_around.register_autograd(lambda ctx, gradient: gradient * 2)
RECOMPUTED = ebb.Policy({"ebb_test::asks_around": ebb.RECOMPUTE})


@pytest.fixture
def once_more():
    yield ONCE_MORE.append
    ONCE_MORE.clear()


def test_an_operator_that_draws_nothing_leaves_the_generator_to_others(once_more):
    x = torch.randn(4, requires_grad=True)
    drawn = []
    torch.manual_seed(1)
    with ebb.region(RECOMPUTED):
        total = asks_around(x * 1).exp().sum()
    drawn.append(torch.rand(3))
    once_more(lambda: drawn.append(torch.rand(3)))
    torch.autograd.grad(total, x)
    drawn.append(torch.rand(3))

    torch.manual_seed(1)
    assert [torch.equal(numbers, torch.rand(3)) for numbers in drawn] == [True] * 3


@pytest.mark.parametrize("when", ["forward", "replay"])
def test_a_kernel_in_python_may_wait_for_a_thread_that_draws(when, once_more):
    x = torch.randn(4, requires_grad=True)

    def draw():
        with ebb.region(EVERYTHING):
            dropped(x * 2)

    if when == "forward":
        once_more(draw)
    with ebb.region(RECOMPUTED):
        total = asks_around(torch.rand_like(x) * x).exp().sum()
    if when == "replay":
        once_more(draw)
    torch.autograd.grad(total, x)


def test_two_threads_replay_draws_at_once():
    x = torch.randn(1_000_000, requires_grad=True)

    def loss_of(seed, region):
        torch.manual_seed(seed)
        with region:
            h = x
            for _ in range(4):
                h = dropped(h).exp().sin()
            return h.sum()

    expected = [torch.autograd.grad(loss_of(s, contextlib.nullcontext()), x)[0] for s in (1, 2)]
    losses = [loss_of(s, ebb.region(EVERYTHING)) for s in (1, 2)]
    found = [None, None]

    def backward(number):
        found[number] = torch.autograd.grad(losses[number], x)[0]

    run_in_threads(partial(backward, 0), partial(backward, 1))

    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
