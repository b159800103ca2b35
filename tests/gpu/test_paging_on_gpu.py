"""PAGE where only a GPU can tell: kernels and streams. Captures are in a file of their own."""

from __future__ import annotations

import pytest
import torch

import ebb
from ebb_tests.gpus import (
    CYCLES,
    NEEDS_GPU,
    RUNS_PAGE_KERNELS,
    Paged,
    eager_region,
    page_region,
    same,
)

pytestmark = [*NEEDS_GPU, RUNS_PAGE_KERNELS]


@pytest.fixture(autouse=True)
def _all_is_done():
    yield
    torch.cuda.synchronize()


@pytest.mark.parametrize("settings", [{}, {"page_rows": 7}, {"host_headroom": 4.0}])
def test_gradients_at_every_load(settings):
    ebb.config.update(
        {f"paging.{name}": value for name, value in settings.items()}, paging_headroom=1.0
    )
    model = Paged()
    for live in (300, 5, 0, 300, 299, 511 if "host_headroom" in settings else 300):
        model.set(live)
        expected = model.gradients(eager_region)
        assert same(expected, model.gradients(page_region))
        assert ebb.experimental.paging.step_ok()
    assert ebb.stats()["paging"]["recorded_steps"] == 1


def test_overflow_and_rerun():
    model = Paged(10)
    model.gradients(page_region)
    for live in (200, 400):
        model.count.fill_(live)
        found = ebb.experimental.paging.run_step(lambda: model.gradients(page_region))
        assert same(model.gradients(eager_region), found)
    assert ebb.stats()["paging"]["overflows"] == 2


def test_the_first_step_of_a_policy_that_pages_nothing_before():
    """Pools are made when the first step is over, whatever stream is current then."""
    model = Paged()
    expected = model.gradients(eager_region)
    torch.cuda.synchronize()
    for _ in range(3):
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            found = model.gradients(page_region)
        torch.cuda.synchronize()
        assert same(found, expected)
    assert ebb.experimental.paging.step_ok()


def test_rows_are_read_after_the_kernel_that_makes_them():
    """The device sleeps in forward, and again before backward."""
    model = Paged()
    for live in (300, 17, 299):
        model.set(live)
        expected = model.gradients(eager_region)
        torch.cuda._sleep(CYCLES // 5)
        x, model.x = model.x, model.x * 1
        loss = model.loss(page_region)
        model.x = x
        torch.cuda._sleep(CYCLES // 5)
        assert same(torch.autograd.grad(loss, model.weights), expected)
    assert ebb.experimental.paging.step_ok()


def test_the_count_may_be_written_after_it_was_marked():
    model = Paged(layers=1)
    expected = model.gradients(eager_region)
    for _ in range(3):
        loss = model.loss(page_region)
        model.count.fill_(1)
        found = torch.autograd.grad(loss, model.weights)
        model.count.fill_(300)
        assert same(found, expected)
    assert ebb.experimental.paging.step_ok()


def test_found_inf_says_what_step_ok_says():
    model = Paged()
    model.gradients(page_region)
    for live, bad in ((300, False), (512, True)):
        model.count.fill_(live)
        model.gradients(page_region)
        for name in ("cuda", torch.device("cuda"), "cuda:0"):
            assert ebb.experimental.paging.found_inf(name).item() == float(bad)
        assert ebb.experimental.paging.step_ok() == (not bad)


@pytest.mark.parametrize("fused", [False, True])
def test_an_optimizer_refuses_gradients_of_a_step_without_room(fused):
    model = Paged()
    optimizer = torch.optim.AdamW(model.weights, lr=1e-3, fused=fused)
    before = [w.detach().clone() for w in model.weights]
    for live in (10, 500):
        optimizer.zero_grad()
        model.count.fill_(live)
        model.loss(page_region).backward()
    with pytest.raises(ebb.experimental.PageOverflowError):
        optimizer.step()
    assert same(model.weights, before)
