"""Replays ahead on a GPU, on backward's stream and beside it: the bits are eager's."""

from __future__ import annotations

import contextlib
import time

import pytest
import torch
from torch import nn

import ebb
from ebb_tests.gpus import MIB, NEEDS_GPU, RUNS_PAGE_KERNELS, bits_of_eager, offloading, same
from ebb_tests.programs.ahead import Block, WaitInBackward, counts, parameters
from ebb_tests.programs.paged import Masked, fresh
from ebb_tests.replays import wait_for_replays

pytestmark = NEEDS_GPU

RECOMPUTE = ebb.policies.recompute_all
INPUTS_LEAVE = ebb.Policy({"aten::native_layer_norm": ebb.OFFLOAD}, inputs=ebb.OFFLOAD)
STEPS = 10


@pytest.fixture(autouse=True)
def ahead():
    ebb.config.update(ahead_regions=1, ahead_limit="1GiB")
    yield
    wait_for_replays()
    torch.cuda.synchronize()


@pytest.fixture
def x():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(8, 128, 256, generator=generator).to("cuda").requires_grad_()


@pytest.fixture
def modules():
    torch.manual_seed(2)
    return [Block(width=256).to("cuda") for _ in range(6)]


def gradients(modules, x, policy=RECOMPUTE, waits=True):
    """Without a policy: eager's."""
    h = x
    for module in modules:
        with ebb.region(policy) if policy else contextlib.nullcontext():
            h = module(WaitInBackward.apply(h) if waits else h)
    loss = h.square().mean()
    return [loss.detach(), *torch.autograd.grad(loss, [*parameters(modules), x])]


def assert_exact(modules, x, policy=RECOMPUTE, waits=True):
    """For some steps; gives what replays ahead did."""

    def eager():
        torch.manual_seed(3)
        return gradients(modules, x, None, waits)

    expected = bits_of_eager(eager)

    def steps():
        for _ in range(STEPS):
            torch.manual_seed(3)
            assert same(gradients(modules, x, policy, waits), expected)

    return counts(steps)


@pytest.mark.parametrize("waits", [True, False])
def test_a_chain(modules, x, waits):
    did = assert_exact(modules, x, waits=waits)

    assert did["failures"] == 0
    if waits:
        assert did["regions_in_time"] == STEPS * (len(modules) - 1)


class DropPath(nn.Module):
    """A block whose rows are dropped by an operator that takes a Generator: it may run ahead while
    backward replays dropout, which takes none."""

    def __init__(self, block: nn.Module):
        super().__init__()
        self.block = block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        lives = x.new_empty(len(x), 1, 1).bernoulli_(0.7)
        return x + self.block(x) * lives


def test_dropped_paths_beside_dropout(x):
    torch.manual_seed(2)
    kinds = [Block(width=256, dropout=0.2), DropPath(Block(width=256))] * 3
    modules = [module.to("cuda") for module in kinds]

    for waits in (True, False):
        assert assert_exact(modules, x, waits=waits)["failures"] == 0


def test_offloaded_inputs(modules, x):
    with offloading(in_flight_bytes=0):  # else what has not left yet is not fetched
        before = ebb.stats()["offload"]
        did = assert_exact(modules, x, INPUTS_LEAVE)
        after = ebb.stats()["offload"]

    assert did["failures"] == 0
    assert after["bytes_fetched"] > before["bytes_fetched"]
    # The first two of each step, and inputs of a region whose replay ahead begins before that.
    assert after["fetched_late"] - before["fetched_late"] <= 3 * STEPS


@RUNS_PAGE_KERNELS
def test_pages():
    net = Masked(layers=4, width=64, rows=512, device="cuda")
    entered = ebb.Policy({"aten::mm": ebb.PAGE})
    with fresh():
        for step in range(STEPS):
            x, count = net.inputs(step), net.live(300 - step)
            expected = torch.autograd.grad(net(x, count), net.weights)
            with ebb.experimental.paging.step():
                loss = net(x, count, lambda: ebb.region(entered))
                found = torch.autograd.grad(loss, net.weights)
            assert same(found, expected)
            assert ebb.experimental.paging.step_ok()


def test_two_streams_of_the_programs_own(modules, x):
    streams = [torch.cuda.Stream() for _ in range(2)]
    expected = bits_of_eager(lambda: gradients(modules, x, None))
    for _ in range(STEPS):
        for stream in streams:
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                found = gradients(modules, x)
            torch.cuda.current_stream().wait_stream(stream)
            assert same(found, expected)


def test_a_capture_between_steps(modules, x):
    """While it goes on nothing runs ahead; before and after it does."""
    expected = bits_of_eager(lambda: gradients(modules, x, None, waits=False))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            gradients(modules, x, waits=False)
    wait_for_replays()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    before = ebb.stats()["ahead"]
    with torch.cuda.graph(graph, stream=stream):
        found = gradients(modules, x, waits=False)
    assert ebb.stats()["ahead"]["regions_in_time"] == before["regions_in_time"]

    for _ in range(3):
        graph.replay()
        assert same(found, expected)
        assert same(gradients(modules, x), expected)


def allocated_between_steps():
    """torch's autograd thread holds the gradients for a moment after backward has returned."""
    wait_for_replays()
    torch.cuda.synchronize()
    time.sleep(0.2)
    return torch.cuda.memory_allocated()


def test_memory_is_back_after_each_step(modules, x):
    """No more is held between steps, whichever stream it was allocated on."""
    for _ in range(3):
        gradients(modules, x)
    allocated, reserved = allocated_between_steps(), torch.cuda.memory_reserved()
    for _ in range(STEPS):
        gradients(modules, x)

    assert allocated_between_steps() == allocated
    assert torch.cuda.memory_reserved() <= reserved + 64 * MIB  # blocks of a step in another order
