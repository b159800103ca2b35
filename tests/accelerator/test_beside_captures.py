"""Steps on one thread while another thread captures a graph, on another stream. A capture forbids
queries and waits on all threads: see Note [Captures of other threads]."""

from __future__ import annotations

import gc
import threading

import pytest
import torch

import ebb
from ebb import _testing
from ebb_tests import device as late
from ebb_tests.device_leaves import leaf, needs_captures

pytestmark = needs_captures

POLICIES = {
    "recompute": ebb.policies.recompute_all,
    "offload": ebb.Policy(default=ebb.OFFLOAD, inputs=ebb.OFFLOAD),
}


def step(x, policy, stream):
    with stream:
        with ebb.region(policy):
            loss = (x * 2).sin().cos().sum()
        return torch.autograd.grad(loss, x)[0]


def dropped(x, policy, stream):
    """A step without a backward: what was offloaded dies."""
    with stream, ebb.region(policy):
        (x * 2).sin().cos().sum()
    gc.collect()
    return step(x, policy, stream)


def on_another_thread(function):
    result = []
    thread = threading.Thread(target=lambda: result.append(function()))
    thread.start()
    thread.join()
    return result


@pytest.mark.parametrize("in_flight", [0, 1 << 30])
@pytest.mark.parametrize("program", [step, dropped])
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_neither_the_step_nor_the_capture_fails(policy, program, in_flight, device, streams):
    _testing.drain_offload()
    ebb.config.update(offload_min_bytes=1, offload_in_flight_bytes=in_flight)
    x, z = leaf(device), torch.rand(8).to(device)
    late.synchronize()
    expected = step(x, ebb.policies.save_all, streams[1])
    program(x, policy, streams[1])
    late.synchronize()

    with late.Graph().capture(streams[0]) as graph:
        captured = z * 3
        gradients = on_another_thread(lambda: program(x, policy, streams[1]))
        captured = captured + 1
    graph.replay_and_wait()

    assert torch.equal(gradients[0].cpu(), expected.cpu())
    assert torch.equal(captured.cpu(), z.cpu() * 3 + 1)
