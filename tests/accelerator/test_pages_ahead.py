"""Pages that come back ahead of backward, on its stream and beside it."""

from __future__ import annotations

import contextlib

import pytest
import torch

import ebb
from ebb_tests import device as late
from ebb_tests.device_leaves import needs_captures
from ebb_tests.programs.ahead import Squeeze, WaitingLayers, bytes_in_use_between_regions, counts
from ebb_tests.programs.captured_paging import Step
from ebb_tests.programs.paged import PRODUCTS, STEPS, Masked, gradients, masked, products, same
from ebb_tests.replays import delays

pytestmark = pytest.mark.usefixtures("fresh_pages")


def found(net, x, n, region=contextlib.nullcontext):
    results = gradients(net, x, n, region)
    torch.accelerator.synchronize()
    return results


@pytest.mark.parametrize(("compute", "side"), [(0, 0), (300, 0), (0, 300), (200, 200)])
@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_streams_run_late_at_random(step, compute, side, ahead, device):
    net, x, n = masked(device, layers=4)
    right = found(net, x, n)

    def program():
        for _ in range(4):
            with step():
                results = gradients(net, x, n, products)
            assert same(right, results)
            assert ebb.experimental.paging.step_ok()

    with late.delayed(compute, side):
        did = counts(program)
    assert did["failures"] == 0
    assert ebb.stats()["paging"]["recorded_steps"] == 1


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
def test_pages_of_a_graph_are_left_to_backward(ahead, device):
    """A graph runs on another stream than the worker."""
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


def test_page_that_has_been_read_is_freed(ahead, device):
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


def test_pages_without_memory_ahead_are_left_to_backward(ahead, device):
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


def test_a_wait_that_is_left_out_shows(ahead, device):
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
