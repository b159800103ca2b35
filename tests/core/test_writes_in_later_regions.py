"""A later region writes to what one region has computed and another one has read."""

from __future__ import annotations

import contextlib
import threading

import pytest
import torch

import ebb
from ebb_tests.exactness import like_eager, same_bits


def in_place(h):
    h.add_(1)


def through_a_view(h):
    h[1:].mul_(3)


def through_an_alias(h):
    with torch.no_grad():
        h.detach().view(-1)[:3].zero_()


def with_its_own_counter(h):
    h.data.mul_(2)


def as_out(h):
    with torch.no_grad():
        torch.add(h.detach(), 1, out=h.detach())


def unseen(h):
    with torch.no_grad(), ebb.opaque(h):
        h.detach().mul_(2)


def twice(h):
    h.add_(1)
    h.mul_(2)


WRITES = (in_place, through_a_view, through_an_alias, with_its_own_counter, as_out, unseen, twice)


def of_a_sum(x):
    return x + 1


def without_grad(x):
    with torch.no_grad():
        return x.exp()


def through_a_product(x):
    """Its result is a view with a version counter of its own."""
    return torch.nn.functional.linear(x[None], torch.eye(4, dtype=x.dtype))[0]


def run(region, write, make=of_a_sum, read=lambda h, x: (h * 2 + x).sin()):
    """The loss and the inputs of three regions in a row."""
    x = torch.linspace(-1, 1, 16, dtype=torch.float64).view(4, 4).requires_grad_()
    with region:
        h = make(x)
    with region:
        k = read(h, x).sum()
    with region:
        write(h)
    return k + (h * h).sum(), x


def gradient(*args, **kwargs):
    loss, x = run(*args, **kwargs)
    return torch.autograd.grad(loss, x)[0]


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("make", [of_a_sum, without_grad, through_a_product])
@like_eager()
def test_the_region_between_recomputes_from_what_it_read(region, write, make):
    return gradient(region, write, make)


def test_where_eager_raises_ebb_does():
    def saved(h, x):
        return h.sin() * 2

    for region in (torch.enable_grad(), ebb.region()):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            gradient(region, in_place, read=saved)


@like_eager(ebb.policies.recompute_all)
def test_several_regions_that_read_it_have_a_copy_each(region):
    x = torch.linspace(-1, 1, 16, dtype=torch.float64, requires_grad=True)
    with region:
        h = x + 1
    losses = []
    for step in range(3):
        with region:
            losses.append((h * (step + 2)).cos().sum())
        with region:
            h.mul_(0.5)
    return torch.autograd.grad(sum(losses), x)[0]


@pytest.mark.parametrize("write", [in_place, twice])
def test_it_is_copied_once_where_a_replay_needs_it(write):
    ebb.reset_stats()
    _, x = run(ebb.region(), write)

    assert ebb.stats()["total"]["bytes_copied"] == x.nbytes


def test_nothing_is_copied_where_no_replay_needs_it():
    def dropped(h, x):
        (h * 2).sin()
        return x

    def differentiated(h, x):
        return torch.autograd.grad((h * 2 + x).sin().sum(), x)[0]

    ebb.reset_stats()
    run(ebb.region(ebb.policies.save_all), in_place)
    run(ebb.region(), in_place, read=dropped)
    run(ebb.region(), in_place, read=differentiated)

    assert ebb.stats()["total"]["bytes_copied"] == 0


def test_another_thread_recomputes_the_region_between_meanwhile():
    x = torch.linspace(-1, 1, 16, dtype=torch.float64).view(4, 4).requires_grad_()
    expected = torch.autograd.grad(((x + 1) * 2 + x).sin().sum(), x)[0]

    for _ in range(20):
        with ebb.region():
            h = x + 1
        with ebb.region():
            k = (h * 2 + x).sin().sum()
        seen = []

        def backward(k=k, seen=seen):
            seen.extend(torch.autograd.grad(k, x))

        thread = threading.Thread(target=backward)
        thread.start()
        with ebb.region():
            h.add_(1)
        thread.join()

        assert same_bits(seen[0], expected)


def test_an_earlier_result_after_an_opaque_write():
    def gradient(region):
        torch.manual_seed(0)
        x, w = torch.randn(4, 4), torch.randn(4, 4, requires_grad=True)
        with region():
            y = x * 2
        with region():
            with ebb.opaque(y):
                y.numpy()[:] = 3
            z = ((y * 1.5) * w).sin() * 2  # the recipe of y * 1.5 reads what the opaque write left
        with region():
            y.add_(1)
        return torch.autograd.grad(z.sum(), w)[0]

    expected = gradient(contextlib.nullcontext)
    assert same_bits(gradient(lambda: ebb.region(ebb.policies.recompute_all)), expected)
