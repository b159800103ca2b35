"""PAGE where only a GPU can tell: kernels and streams. Captures are in a file of their own."""

from __future__ import annotations

import pytest
import torch
from gpus import CYCLES, NEEDS_GPU, PAGE_ALL, same
from torch.nn.functional import gelu, layer_norm

import ebb

pytestmark = NEEDS_GPU

ROWS, WIDTH = 512, 64


@pytest.fixture(autouse=True)
def _anew():
    before = {k: v for k, v in ebb.paging.configure().items() if v is not None}
    ebb.paging.reset()
    torch.manual_seed(0)
    yield
    torch.cuda.synchronize()
    ebb.paging.reset()
    ebb.paging.configure(**before)


def weights(layers=3):
    return [torch.randn(WIDTH, WIDTH, device="cuda").div(8).requires_grad_() for _ in range(layers)]


def program(x, count, all_weights, paged):
    """Dead rows do not reach the loss; nobody reads the count on the host."""
    lives = (torch.arange(ROWS, device="cuda") < count).unsqueeze(1)
    x = torch.where(lives, x, 0)
    for w in all_weights:
        if paged:
            with ebb.region(PAGE_ALL):
                x = layer_norm(gelu(ebb.mark_rows(x * 1.5, count) @ w), (WIDTH,))
        else:
            x = layer_norm(gelu((x * 1.5) @ w), (WIDTH,))
    return torch.where(lives, x, 0).sin().sum()


def gradients(x, count, all_weights, paged):
    return torch.autograd.grad(program(x, count, all_weights, paged), all_weights)


@pytest.mark.parametrize("settings", [{}, {"page_rows": 7}, {"host_headroom": 4.0}])
def test_gradients_at_every_load(settings):
    ebb.paging.configure(headroom=1.0, **settings)
    all_weights = weights()
    for live in (300, 5, 0, 300, 299, 511 if "host_headroom" in settings else 300):
        x, count = torch.randn(ROWS, WIDTH, device="cuda"), torch.tensor(live, device="cuda")
        expected = gradients(x, count, all_weights, False)
        assert same(expected, gradients(x, count, all_weights, True))
        assert ebb.paging.step_ok()
    assert ebb.stats()["paging"]["recorded_steps"] == 1


def test_overflow_and_rerun():
    all_weights = weights()
    x = torch.randn(ROWS, WIDTH, device="cuda")
    gradients(x, torch.tensor(10, device="cuda"), all_weights, True)
    for live in (200, 400):
        count = torch.tensor(live, device="cuda")
        found = ebb.paging.run_step(lambda count=count: gradients(x, count, all_weights, True))
        assert same(gradients(x, count, all_weights, False), found)
    assert ebb.stats()["paging"]["overflows"] == 2


def test_the_first_step_of_a_policy_that_pages_nothing_before():
    """Pools are made when the first step is over, whatever stream is current then."""
    all_weights = weights()
    x, count = torch.randn(ROWS, WIDTH, device="cuda"), torch.tensor(300, device="cuda")
    expected = gradients(x, count, all_weights, False)
    torch.cuda.synchronize()
    for _ in range(3):
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            found = gradients(x, count, all_weights, True)
        torch.cuda.synchronize()
        assert same(found, expected)
    assert ebb.paging.step_ok()


def test_rows_are_read_after_the_kernel_that_makes_them():
    """The device sleeps in forward, and again before backward."""
    all_weights = weights()
    for live in (300, 17, 299):
        x, count = torch.randn(ROWS, WIDTH, device="cuda"), torch.tensor(live, device="cuda")
        expected = gradients(x, count, all_weights, False)
        torch.cuda._sleep(CYCLES // 5)
        loss = program(x * 1, count, all_weights, True)
        torch.cuda._sleep(CYCLES // 5)
        assert same(torch.autograd.grad(loss, all_weights), expected)
    assert ebb.paging.step_ok()


def test_the_count_may_be_written_after_it_was_marked():
    all_weights = weights(1)
    x, count = torch.randn(ROWS, WIDTH, device="cuda"), torch.tensor(300, device="cuda")
    expected = gradients(x, count, all_weights, False)
    for _ in range(3):
        loss = program(x, count, all_weights, True)
        count.fill_(1)
        found = torch.autograd.grad(loss, all_weights)
        count.fill_(300)
        assert same(found, expected)
    assert ebb.paging.step_ok()


def test_found_inf_says_what_step_ok_says():
    all_weights = weights()
    x = torch.randn(ROWS, WIDTH, device="cuda")
    gradients(x, torch.tensor(300, device="cuda"), all_weights, True)
    for live, bad in ((300, False), (512, True)):
        gradients(x, torch.tensor(live, device="cuda"), all_weights, True)
        for name in ("cuda", torch.device("cuda"), "cuda:0"):
            assert ebb.paging.found_inf(name).item() == float(bad)
        assert ebb.paging.step_ok() == (not bad)


@pytest.mark.parametrize("fused", [False, True])
def test_an_optimizer_refuses_gradients_of_a_step_without_room(fused):
    all_weights = weights()
    optimizer = torch.optim.AdamW(all_weights, lr=1e-3, fused=fused)
    before = [w.detach().clone() for w in all_weights]
    x = torch.randn(ROWS, WIDTH, device="cuda")
    for live in (10, 500):
        optimizer.zero_grad()
        program(x, torch.tensor(live, device="cuda"), all_weights, True).backward()
    with pytest.raises(ebb.PageOverflowError):
        optimizer.step()
    assert same(all_weights, before)
