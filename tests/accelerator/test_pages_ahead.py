"""Pages that come back ahead of backward, on its stream and beside it."""

from __future__ import annotations

import contextlib
import gc

import pytest
import torch

import ebb
from ebb_tests import device as late
from ebb_tests.device_leaves import needs_captures
from ebb_tests.programs.ahead import Squeeze, WaitingLayers, bytes_in_use_between_regions, counts
from ebb_tests.programs.captured_paging import Step
from ebb_tests.programs.paged import PRODUCTS, Masked, gradients, masked, products, same
from ebb_tests.replays import delays, wait_for_replays

pytestmark = pytest.mark.usefixtures("fresh_pages")

STEPS = {
    "in order": ebb.experimental.paging.step,
    "in any order": lambda: ebb.experimental.paging.step(False),
    "not bracketed": contextlib.nullcontext,
}


def found(net, x, n, region=contextlib.nullcontext):
    results = gradients(net, x, n, region)
    torch.accelerator.synchronize()
    return results


@pytest.mark.parametrize("prefetch", [0, 1])
@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_all_but_the_last_layer_are_there_in_time(step, prefetch, ahead, device):
    ebb.config.paging.prefetch = prefetch
    net = WaitingLayers(device=device)
    x, n = net.inputs(0), net.live(20)
    right = found(net, x, n)

    def program():
        for _ in range(4):
            with step():
                results = found(net, x, n, products)
            assert same(right, results)
            assert ebb.experimental.paging.step_ok()

    did = counts(program)
    assert did["regions_in_time"] == 2 * 4
    assert did["regions_stopped"] == did["failures"] == 0
    assert ebb.stats()["paging"]["recorded_steps"] == 1


@pytest.mark.parametrize(("compute", "side"), [(0, 0), (300, 0), (0, 300), (200, 200)])
@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_streams_run_late_at_random(step, compute, side, ahead, device):
    net, x, n = masked(device, layers=4)
    right = found(net, x, n)
    with late.delayed(compute, side):
        for _ in range(4):
            with step():
                results = gradients(net, x, n, products)
            assert same(right, results)
            assert ebb.experimental.paging.step_ok()


def test_streams_of_the_programs_own(ahead, device, streams):
    net, x, n = masked(device)
    right = found(net, x, n)
    for _ in range(4):
        with ebb.experimental.paging.step(False):
            results = []
            for stream in streams:
                with stream:
                    results.append(gradients(net, x, n, products))
        late.synchronize()
        assert all(same(right, result) for result in results)
        assert ebb.experimental.paging.step_ok()


class Products(Step):
    def __init__(self, device):
        super().__init__(device)
        self.net = WaitingLayers(device=device)

    def run(self):
        self.found = gradients(self.net, self.x, self.n, products)


@needs_captures
def test_what_a_graph_has_is_left_to_backward(ahead, device):
    """Its calls come after those of the stream on which graphs run, which the worker is not on."""
    step = Products(device)
    step.warm()
    graph = step.capture()

    def program():
        for number, live in enumerate([30, 4, 17]):
            step.set(live, number)
            graph.replay()
            assert step.is_right()
            step.set(30 - live, number + 1)
            step.run()
            assert step.is_right()

    did = counts(program)
    assert did["regions_stopped"] == 2 * 3
    assert did["regions_in_time"] == did["failures"] == 0
    assert ebb.experimental.paging.step_ok()


def test_what_came_back_and_has_been_read_is_gone(ahead, device):
    """Steps that are recorded hold nothing but what they need."""

    def bytes_in_use():
        ebb.experimental.paging.reset()
        return bytes_in_use_between_regions(device, PRODUCTS)

    ahead_of_backward = bytes_in_use()
    ebb.config.ahead.regions = 0
    without = bytes_in_use()
    result, live_rows = 1536, 1024  # in blocks of the allocator's
    assert ahead_of_backward - without == 8 * (result - live_rows)


def test_an_overflow_is_told_by_the_step(ahead, device):
    net = WaitingLayers(device=device)
    x = net.inputs(0)
    outcomes = []
    for live in (5, 40, 40, 40):
        n = net.live(live)
        outcomes.append(same(found(net, x, n), found(net, x, n, products)))
        outcomes.append(ebb.experimental.paging.step_ok())
    assert outcomes == [True, True, False, False, True, True, True, True]


def test_what_backward_never_asks_for_is_given_back(ahead, device):
    net = WaitingLayers(device=device)
    x, n = net.inputs(0), net.live(20)

    def program():
        h, last = x, None
        for index in range(3):
            last = h
            with products():
                h = net.layer(ebb.experimental.mark_rows(h.mul(1.5), n), index)
        torch.autograd.grad(h[:20].sum(), last)
        wait_for_replays()

    for _ in range(4):
        with ebb.experimental.paging.step(False):
            program()
            gc.collect()
            assert ebb.stats()["paging"]["stashes"] == 0
        assert ebb.experimental.paging.step_ok()
    assert ebb.stats()["ahead"]["bytes"] == 0


def test_no_memory_ahead_is_no_failure(ahead, device):
    net = WaitingLayers(device=device)
    x, n = net.inputs(0), net.live(20)
    right = found(net, x, n)
    for _ in range(2):
        found(net, x, n, products)

    class Squeezed(Masked):
        def layer(self, h, index):
            return super().layer(Squeeze.apply(h), index)

    net = Squeezed(device=device)
    failures = 0
    with delays(2000):
        for _ in range(50):  # the worker may be done before memory is short
            failures += counts(lambda: found(net, x, n, products))["failures"]
            if failures > 0:
                break
        results = found(net, x, n, products)
    assert failures > 0
    assert same(right, results)
    assert ebb.experimental.paging.step_ok()


def test_each_wait_matters(ahead, device):
    net = WaitingLayers(device=device)
    x, n = net.inputs(0), net.live(20)
    right = 2 * found(net, x, n)
    for _ in range(3):
        found(net, x, n, products)

    def program():
        return [gradient for _ in range(2) for gradient in gradients(net, x, n, products)]

    missed = [
        which
        for which, results, findings in late.each_wait_left_out(program)
        if not findings and same(right, results)
    ]
    assert missed == [-1]  # which leaves out none
