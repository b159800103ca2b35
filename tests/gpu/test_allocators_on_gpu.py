"""torch's other allocators, memory that streams and threads share, and captures beside steps."""

from __future__ import annotations

import gc
import threading

import pytest
import torch
import torch.nn.functional as F

import ebb
from ebb import _testing
from ebb._region import unseen_writes
from ebb_tests.gpus import (
    CYCLES,
    DRAWS_NUMBERS,
    MIB,
    NEEDS_GPU,
    OFFLOAD_ALL,
    SLEEPS,
    assert_ended_well,
    bits_of_eager,
    chain,
    leaf,
    offloading,
    run_in_a_process,
    same,
)

pytestmark = NEEDS_GPU

STEPS = """
import torch, ebb
from ebb_tests.gpus import OFFLOAD_ALL, chain, leaf

ebb.config.offload.min_bytes = 0
torch.manual_seed(0)
x = leaf()

def gradient(policy=None):
    h = x
    for _ in range(4):
        if policy is None:
            h = chain(h)
        else:
            with ebb.region(policy):
                h = chain(h)
    return torch.autograd.grad(h.square().sum(), x)[0]

expected = gradient()
for name, policy, settings in (
    ("recompute", ebb.policies.recompute_all, {}),
    ("offload", OFFLOAD_ALL, {}),
    ("ahead", ebb.policies.recompute_all, {"regions": 1}),
):
    settings = {"regions": 0} | settings
    ebb.config.update({f"ahead.{name}": value for name, value in settings.items()})
    for _ in range(4):
        assert torch.equal(gradient(policy), expected), name
torch.cuda.synchronize()
print(torch.cuda.get_allocator_backend(), ebb.stats()["total"]["ops_replayed"] > 0)
"""
DRIVERS = pytest.mark.not_dry("virtual memory and memory pools of the driver")


@pytest.mark.parametrize(
    ("setting", "backend"),
    [
        ("garbage_collection_threshold:0.6", "native"),
        pytest.param("expandable_segments:True", "native", marks=DRIVERS),
        pytest.param("backend:cudaMallocAsync", "cudaMallocAsync", marks=DRIVERS),
    ],
)
def test_steps_under_each_allocator(setting, backend):
    done = run_in_a_process(STEPS, PYTORCH_CUDA_ALLOC_CONF=setting)

    assert_ended_well(done)
    assert done.stdout.split() == [backend, "True"]


@SLEEPS
def test_memory_that_was_shared_is_not_used_again_while_a_recorded_stream_reads_it():
    side = torch.cuda.Stream()
    source, shared = (torch.full((MIB,), v, device="cuda") for v in (1.0, 0.0))
    unseen_writes.install()
    _testing.show_memory(shared, source)
    del source
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(CYCLES)
        read = shared * 2
    shared.record_stream(side)
    del shared
    gc.collect()
    kept = [torch.full((MIB,), 7.0, device="cuda") for _ in range(4)]
    torch.cuda.synchronize()

    assert torch.equal(read, torch.full_like(read, 2.0))
    del kept


ROWS = 256
ON_ROWS = {
    "dropout": lambda x: F.dropout(x, 0.5),
    "layer_norm": lambda x: F.layer_norm(x, (ROWS,)),
    "addmm": lambda x: torch.addmm(x[0], x, x),
}


@pytest.mark.parametrize("offset", [1, 2])
@pytest.mark.parametrize("policy", [ebb.policies.recompute_all, OFFLOAD_ALL], ids=str)
@pytest.mark.parametrize(
    "name", [pytest.param("dropout", marks=DRAWS_NUMBERS), "layer_norm", "addmm"]
)
def test_memory_that_is_not_aligned(name, policy, offset):
    """Kernels read several elements at a time where the address allows that, and dropout's mask
    depends on it. The region overwrites the memory, so a replay needs a copy."""

    def run(region):
        torch.manual_seed(0)
        weight = torch.randn(ROWS, device="cuda", requires_grad=True)
        memory = torch.randn(ROWS * ROWS + offset, device="cuda")
        x = torch.from_dlpack(memory[offset:]).view(ROWS, ROWS)
        with region:
            y = (ON_ROWS[name](x) * weight).sin()
            x.zero_()
        return torch.autograd.grad(y.sum(), weight)

    with offloading():
        expected = bits_of_eager(lambda: run(torch.enable_grad()))
        assert same(run(ebb.region(policy)), expected)


def gradient(x, policy, stream):
    with torch.cuda.stream(stream):
        with ebb.region(policy):
            loss = chain(x).sum()
        return torch.autograd.grad(loss, x)[0]


@pytest.mark.parametrize("in_flight", [0, 1 << 30])
@pytest.mark.parametrize("policy", [ebb.policies.recompute_all, OFFLOAD_ALL], ids=str)
def test_steps_of_one_thread_beside_a_capture_of_another(policy, in_flight):
    x, z = leaf(), leaf().detach()
    stream = torch.cuda.Stream()
    graph, found = torch.cuda.CUDAGraph(), []
    with offloading(in_flight_bytes=in_flight):
        expected = gradient(x, ebb.policies.save_all, stream)
        for _ in range(3):  # a capture forbids cudaMalloc, also elsewhere
            gradient(x, policy, stream)
        torch.cuda.synchronize()
        thread = threading.Thread(
            target=lambda: found.extend(gradient(x, policy, stream) for _ in range(3))
        )
        with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
            captured = z * 3
            thread.start()
            thread.join()
            captured = captured + 1
        torch.cuda.synchronize()

    assert same(found, [expected] * 3)
    assert captured.shape == z.shape


def first_product(width: int = 512) -> int:
    """Bytes of the device that a product takes besides its result."""
    x = torch.ones(width, width, device="cuda")
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    y = x @ x
    taken = torch.cuda.memory_allocated() - before - y.nbytes
    del y
    return taken


def test_workspace_of_a_first_product_on_a_thread_and_on_a_stream(record_property):
    """Replays ahead use a thread of their own."""
    first_product()
    found: list[int] = []
    for _ in range(2):
        thread = threading.Thread(target=lambda: found.append(first_product()))
        thread.start()
        thread.join()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        on_stream = [first_product() for _ in range(2)]

    record_property("thread", found)
    record_property("stream", on_stream)
    assert first_product() == 0
    assert on_stream[1] == 0


class Sum(torch.autograd.Function):
    """The sum over all ranks."""

    @staticmethod
    def forward(ctx, x):
        y = x.clone()
        torch.distributed.all_reduce(y)
        return y

    @staticmethod
    def backward(ctx, gradient):
        return Sum.apply(gradient)


@pytest.mark.not_dry("NCCL needs a GPU")
def test_a_collective_of_one_rank_is_repeated(tmp_path):
    x = leaf()

    def run(region):
        with region:
            loss = Sum.apply(x.sin()).cos().sum()
        return torch.autograd.grad(loss, x)

    torch.distributed.init_process_group(
        "nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        expected = bits_of_eager(lambda: run(torch.enable_grad()))
        before = ebb.stats()["total"]["ops_replayed"]
        found = run(ebb.region(ebb.policies.recompute_collectives))
        replayed = ebb.stats()["total"]["ops_replayed"] - before
    finally:
        torch.distributed.destroy_process_group()

    assert same(found, expected)
    assert replayed > 0
