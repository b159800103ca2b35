"""The host does not wait for the device in steady state.

torch's own check (`set_sync_debug_mode`) sees no wait for an event, and no question about one. So
the device is put to sleep, and the host must be back before it wakes up.
"""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

import ebb
from ebb_tests.gpus import (
    CYCLES,
    MIB,
    NEEDS_GPU,
    SLEEPS,
    Paged,
    chain,
    is_back_before_the_device,
    leaf,
    notice_finished_copies,
    offload_region,
    offloading,
    page_region,
)

pytestmark = [*NEEDS_GPU, SLEEPS]


def test_what_waits_is_noticed():
    """The check itself."""
    x = leaf()
    assert [is_back_before_the_device(lambda: x.sin().cos()) for _ in range(2)][1]
    assert not is_back_before_the_device(lambda: x.sum().item())
    event = torch.cuda.Event()
    assert not is_back_before_the_device(lambda: (event.record(), event.synchronize()))


def test_recomputing():
    x = leaf()

    def step():
        with ebb.region():
            loss = torch.nn.functional.dropout(chain(x), 0.3).sum()
        torch.autograd.grad(loss, x)

    assert [is_back_before_the_device(step) for _ in range(3)][1:] == [True, True]


def forward(x):
    with offload_region():
        return chain(x).sum()


OFFLOADED = {
    "default": {},
    "nothing is fetched ahead": {"prefetch_bytes": 0},
    "the last stay": {"keep_last": 2},
    "in flight": {"in_flight_bytes": 8 * MIB},
}


@pytest.mark.parametrize("settings", OFFLOADED.values(), ids=OFFLOADED)
def test_offloading_a_whole_step(settings):
    """Nothing has left when backward begins: the copies sleep as well."""
    x = leaf()

    def step():
        torch.autograd.grad(forward(x), x)

    with offloading(**settings):
        assert [is_back_before_the_device(step) for _ in range(3)][1:] == [True, True]


@pytest.mark.parametrize("settings", OFFLOADED.values(), ids=OFFLOADED)
def test_a_backward_that_fetches(settings):
    """What has left comes back by copies that are queued."""
    x = leaf()

    def backward_is_back():
        loss = forward(x)
        notice_finished_copies()
        before = ebb.stats()["offload"]["bytes_fetched"]
        is_back = is_back_before_the_device(lambda: torch.autograd.grad(loss, x))
        assert ebb.stats()["offload"]["bytes_fetched"] > before
        return is_back

    with offloading(**settings):
        assert [backward_is_back() for _ in range(3)][1:] == [True, True]


class Trained(Paged):
    def __init__(self):
        super().__init__()
        self.optimizer = torch.optim.SGD(self.weights, lr=1e-3)

    def backward(self):
        loss = self.loss(page_region)
        self.optimizer.zero_grad()
        loss.backward()


@pytest.mark.parametrize("bracketed", [None, False, True], ids=["plain", "step", "fixed order"])
def test_paging_forward_and_backward(bracketed):
    model = Trained()

    def step():
        with nullcontext() if bracketed is None else ebb.experimental.paging.step(bracketed):
            model.backward()

    for _ in range(2):
        step()
    assert [is_back_before_the_device(step) for _ in range(3)][1:] == [True, True]
    assert ebb.experimental.paging.step_ok()


@pytest.mark.parametrize("asked", ["optimizer", "step_ok"])
def test_the_flag_of_a_step_is_waited_for_and_nothing_else(asked):
    """What the program has queued since goes on: here a sleep between backward and optimizer."""
    model = Trained()
    ask = model.optimizer.step if asked == "optimizer" else ebb.experimental.paging.step_ok

    def is_back():
        model.backward()
        return is_back_before_the_device(ask)

    assert [is_back() for _ in range(4)][2:] == [True, True]


def test_a_step_that_is_run_by_run_step():
    """It asks how the step went, so it waits for the step's own work, and not for later work."""
    model = Trained()
    side = torch.cuda.Stream()

    def is_back():
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(CYCLES)
            behind = torch.cuda.Event()
            behind.record()
        ebb.experimental.paging.run_step(model.backward)
        sleeps = not behind.query()
        torch.cuda.synchronize()
        return sleeps

    assert [is_back() for _ in range(4)][2:] == [True, True]


def test_torch_sees_no_wait_either():
    model = Trained()
    for _ in range(2):
        model.backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for fixed_order in (False, True, True):
            with ebb.experimental.paging.step(fixed_order):
                model.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert ebb.experimental.paging.step_ok()
