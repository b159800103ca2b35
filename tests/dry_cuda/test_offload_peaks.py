"""OFFLOAD's device memory as torch's CUDA allocator counts it, on the dry CUDA runtime, whose
streams have clocks. Each job is a process of its own, since the runtime reads its settings once."""

from __future__ import annotations

import json

import pytest

from ebb_tests import dry_cuda

BLOCKS = 24
CLOCKS = {"kernel_us": 40, "gemm_us": 200, "gbps": 20}


def job(policy, steps=3, settings=CLOCKS, **options):
    """What the job prints: see offload_job.py."""
    options = {"policy": policy, "steps": steps, "blocks": BLOCKS} | options
    done = dry_cuda.run("offload_job.py", json.dumps(options), **settings)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("policy", ["offload_inputs", "all"])
def test_the_peak_does_not_depend_on_the_lead_of_the_host(policy):
    """Without a synchronisation, the host is some steps ahead at the end."""
    free = job(policy, steps=12)["peaks"]
    synchronized = job(policy, steps=12, synchronize=True)["peaks"]

    assert len({*free, *synchronized}) == 1


def test_offloading_inputs_saves_the_bytes_of_the_inputs():
    """Those of the blocks but for the first, whose input is the job's, and for four: two that are
    leaving or fetched ahead, and the input and the output of the block at work."""
    offloading, recomputing = (job(policy) for policy in ("offload_inputs", "recompute_all"))
    saved = max(recomputing["peaks"]) - max(offloading["peaks"])

    assert saved >= (BLOCKS - 1 - 4) * offloading["input"]


def test_offloading_everything_saves_most_of_what_eager_holds():
    """Three of 24 blocks are on the device: the one at work, and two that are leaving or fetched
    ahead. The job's weights and gradients are there as well."""
    eager, offloading = (job(policy) for policy in ("eager", "all"))

    assert max(offloading["peaks"]) <= max(eager["peaks"]) / 3


def test_copies_overlap_with_computation():
    """The link is fast enough for all inputs, so the step takes no longer than a recomputation. The
    device is so slow that it never waits for the host."""
    slow = {"kernel_us": 400, "gemm_us": 2000, "gbps": 2}
    offloading, recomputing = (
        job(policy, steps=2, blocks=8, settings=slow)["milliseconds"]
        for policy in ("offload_inputs", "recompute_all")
    )

    assert offloading <= 1.02 * recomputing


@pytest.mark.parametrize("policy", ["offload_inputs", "all"])
def test_gradients_have_the_bits_of_eager(policy):
    small = {"blocks": 4, "width": 64, "batch": 4, "tokens": 1024}
    eager, offloading = (
        job(name, steps=2, settings=CLOCKS | {"values": 1}, **small) for name in ("eager", policy)
    )

    assert offloading["bytes_fetched"] > 0
    assert offloading["gradients"] == eager["gradients"]
