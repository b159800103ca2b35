"""OFFLOAD where the device's memory is nearly full."""

from __future__ import annotations

import gc

import pytest
import torch

from ebb_tests.gpus import (
    MIB,
    NEEDS_GPU,
    chain,
    leaf,
    memory_nearly_full,
    offload_region,
    offloading,
)

pytestmark = NEEDS_GPU

TENSOR = 64  # MiB
LENGTH = 32  # of a chain: eager saves 64 tensors, 4 GiB
IN_FLIGHT = 1024 * MIB
# Beside what is on its way: what an op reads and writes, what is fetched ahead, and the gradients.
ROOM = IN_FLIGHT + 768 * MIB


def step(x, region):
    with region():
        loss = chain(x, LENGTH).sum()
    return torch.autograd.grad(loss, x)[0]


@pytest.fixture
def leaf_and_gradient():
    """What eager computes. In the test OFFLOAD is set; kernels are loaded, host memory is there."""
    x = leaf(TENSOR)
    expected = step(x, torch.enable_grad).cpu()
    with offloading(in_flight_bytes=IN_FLIGHT, prefetch_bytes=512 * MIB):
        step(x, offload_region)
        yield x, expected


def test_memory_nearly_full_with_a_gibibyte_in_flight(leaf_and_gradient):
    x, expected = leaf_and_gradient
    with memory_nearly_full(ROOM):
        with pytest.raises(torch.OutOfMemoryError):
            step(x, torch.enable_grad)
        gc.collect()
        for _ in range(3):
            assert torch.equal(step(x, offload_region).cpu(), expected)


def test_what_has_left_makes_room_when_memory_runs_out(leaf_and_gradient):
    """More may be in flight than there is room for: the allocator asks for what is done."""
    x, expected = leaf_and_gradient
    with memory_nearly_full(ROOM // 2):
        for _ in range(3):
            assert torch.equal(step(x, offload_region).cpu(), expected)


def test_after_memory_ran_out_the_next_step_is_right(leaf_and_gradient):
    x, expected = leaf_and_gradient
    with memory_nearly_full(TENSOR * MIB + MIB), pytest.raises(torch.OutOfMemoryError):
        step(x, offload_region)
    gc.collect()
    assert torch.equal(step(x, offload_region).cpu(), expected)
