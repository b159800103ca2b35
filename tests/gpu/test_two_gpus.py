"""Two GPUs in one process: what belongs to one is not taken for the other's."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

import ebb
from ebb._testing import PagePool
from ebb_tests.gpus import (
    DRAWS_NUMBERS,
    NEEDS_TWO_GPUS,
    OFFLOAD_ALL,
    PAGE_ALL,
    RUNS_PAGE_KERNELS,
    assert_ended_well,
    chain,
    leaf,
    offloading,
    run_in_a_process,
    same,
)
from ebb_tests.replays import wait_for_replays

pytestmark = NEEDS_TWO_GPUS

DEVICES = ["cuda:0", "cuda:1"]
devices = pytest.mark.parametrize("device", DEVICES)
currents = pytest.mark.parametrize("current", [0, 1])


@RUNS_PAGE_KERNELS
@devices
@currents
def test_a_page_pool_runs_on_its_own_device(device, current):
    with torch.cuda.device(current):
        pool = PagePool(torch.device(device), 256, 4, 6)
        data = torch.randint(0, 256, (24, 256), dtype=torch.uint8, device=device)
        found = torch.empty_like(data)
        ticket = pool.make_ticket(24)
        pool.stash(ticket, data, torch.tensor(17, device=device))
        pool.restore(ticket, found)
        assert torch.equal(found[:17], data[:17])
        assert pool.status()["errors"] == 0


def paged_gradient(x, count, paged):
    if paged:
        with ebb.region(PAGE_ALL):
            y = chain(ebb.experimental.mark_rows(x * 1.5, count))
    else:
        y = chain(x * 1.5)
    lives = (torch.arange(len(x), device=x.device) < count).unsqueeze(1)
    return torch.autograd.grad(torch.where(lives, y, 0).sum(), x)[0]


@RUNS_PAGE_KERNELS
@devices
@currents
def test_paging_on_another_device_than_the_current_one(device, current):
    x = torch.randn(512, 64, device=device, requires_grad=True)
    with torch.cuda.device(current):
        for live in (300, 7, 299):
            count = torch.tensor(live, device=device)
            with ebb.experimental.paging.step():
                found = paged_gradient(x, count, True)
            assert torch.equal(found, paged_gradient(x, count, False))
            assert ebb.experimental.paging.step_ok()


@RUNS_PAGE_KERNELS
def test_a_flag_is_that_of_its_device():
    tensors = [torch.randn(512, 64, device=device, requires_grad=True) for device in DEVICES]
    for x in tensors:
        paged_gradient(x, torch.tensor(10, device=x.device), True)
    paged_gradient(tensors[1], torch.tensor(500, device="cuda:1"), True)

    with torch.cuda.device(1):
        assert ebb.experimental.paging.found_inf("cuda").item() == 1.0
    assert ebb.experimental.paging.found_inf("cuda:1").item() == 1.0
    assert ebb.experimental.paging.found_inf("cuda:0").item() == 0.0
    assert not ebb.experimental.paging.step_ok()


@devices
@currents
def test_offloading_from_another_device_than_the_current_one(device, current):
    x = leaf(device=device)
    expected = torch.autograd.grad(chain(x).sum(), x)[0]
    with torch.cuda.device(current), offloading(in_flight_bytes=8 << 20):
        for _ in range(3):
            with ebb.region(OFFLOAD_ALL):
                loss = chain(x).sum()
            torch.cuda.synchronize(device)
            assert torch.equal(torch.autograd.grad(loss, x)[0], expected)


@DRAWS_NUMBERS
def test_a_model_on_both():
    weights = [torch.randn(256, 256, device=d).div_(16).requires_grad_() for d in DEVICES * 2]
    x = torch.randn(128, 256, device="cuda:0")

    def gradients(make_region, seed):
        torch.manual_seed(seed)
        h = x
        with make_region():
            for w in weights:
                h = F.dropout(F.gelu(h.to(w.device) @ w), 0.2)
            loss = h.sin().sum()
        return torch.autograd.grad(loss, weights)

    with offloading(in_flight_bytes=1 << 20):
        for seed in range(5):
            expected = gradients(torch.enable_grad, seed)
            for policy in (ebb.policies.recompute_all, OFFLOAD_ALL):
                assert same(gradients(lambda policy=policy: ebb.region(policy), seed), expected)


@currents
def test_replays_ahead_on_both(current):
    """Each GPU has a worker; a region that uses both is left to backward."""
    weights = [
        torch.randn(256, 256, device=d).div_(16).requires_grad_() for d in sorted(DEVICES * 3)
    ]
    x = torch.randn(128, 256, device="cuda:0")

    def gradients(make_region):
        h = x
        for w in weights:
            with make_region():
                h = F.gelu(h.to(w.device) @ w).tanh()
        return torch.autograd.grad(h.sin().sum(), weights)

    expected = gradients(torch.enable_grad)
    ebb.config.ahead.regions = 1
    try:
        with torch.cuda.device(current):
            for _ in range(10):
                found = gradients(lambda: ebb.region(ebb.policies.recompute_all))
                assert same(found, expected)
    finally:
        wait_for_replays()


NO_CONTEXT = """
import torch, ebb
from ebb_tests.gpus import OFFLOAD_ALL, chain, leaf
ebb.config.offload.min_bytes = 0
x = leaf(device="cuda:1")
with ebb.region(OFFLOAD_ALL):
    loss = chain(x).sum()
torch.cuda.synchronize("cuda:1")
torch.autograd.grad(loss, x)
assert torch._C._cuda_hasPrimaryContext(1)
assert not torch._C._cuda_hasPrimaryContext(0), "memory of GPU 0 is taken"
"""


@pytest.mark.not_dry("each device has a context from the start")
def test_no_context_is_made_on_a_device_that_is_not_used():
    assert_ended_well(run_in_a_process(NO_CONTEXT))
