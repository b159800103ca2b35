"""Host memory and time per op and per region, for any number of ops, regions and micro-batches."""

from __future__ import annotations

import gc
import importlib
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch

import ebb

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
OPS_OF_REGION = 8
REGIONS_OF_BATCH = 8

# Upper bounds of the host bytes that a program needs more with ebb than in eager: for each op of a
# chain without saved tensors, for each region, and for each region of eight ops with seven saved
# tensors. An op takes about 259 bytes: the recipe 136, the value 120.
BYTES_OF_OP = 262
BYTES_OF_REGION = 1_100
BYTES_OF_EIGHT_OPS = 2_800

X = torch.randn(8).requires_grad_()


def eager():
    return nullcontext()


def region():
    return ebb.region(ebb.policies.recompute_all)


def chain(ops, enter):
    with enter():
        h = X
        for _ in range(ops):
            h = h.neg()
        return h.sin()


def regions(count, enter, h=X):
    for _ in range(count):
        with enter():
            h = ((h * 1.5).sin() + 1.0).exp()
            h = (h * 0.5).tanh().neg().sigmoid()
    return h


def batches(count, enter):
    """Micro-batches in flight: each has its own forward."""
    return torch.stack([regions(REGIONS_OF_BATCH, enter) for _ in range(count)])


def added_bytes(make, ops, monkeypatch):
    """By ebb, to those that a result of `make` holds in eager. `ops`: of one result."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    held = importlib.import_module("host_memory").bytes_held_by
    count = max(1, 12_000 // ops)  # more than ebb's arena keeps for reuse
    found = []
    for _ in range(3):  # other threads of the process allocate too
        ours, eagers = held(partial(make, region), count), held(partial(make, eager), count)
        if not ours or not eagers:
            pytest.skip("needs glibc's mallinfo2")
        found.append(ours - eagers)
    return min(found)


@pytest.mark.parametrize(
    "ops", [10, 100, 1_000, 10_000, pytest.param(100_000, marks=pytest.mark.slow)]
)
def test_bytes_per_op_do_not_depend_on_the_length_of_the_region(ops, monkeypatch):
    added = added_bytes(partial(chain, ops), ops, monkeypatch)

    assert added <= ops * BYTES_OF_OP + BYTES_OF_REGION


@pytest.mark.parametrize("count", [10, 100, 1_000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_bytes_per_region_do_not_depend_on_the_number_of_regions(count, monkeypatch):
    added = added_bytes(partial(regions, count), count * OPS_OF_REGION, monkeypatch)

    assert added <= count * BYTES_OF_EIGHT_OPS


@pytest.mark.parametrize("count", [1, 8, 128])
def test_bytes_per_region_do_not_depend_on_the_micro_batches_in_flight(count, monkeypatch):
    per_batch = REGIONS_OF_BATCH * OPS_OF_REGION
    added = added_bytes(partial(batches, count), count * per_batch, monkeypatch)

    assert added <= count * REGIONS_OF_BATCH * BYTES_OF_EIGHT_OPS


def seconds(make, enter):
    """Of a step, without the release of what backward leaves."""
    start = time.perf_counter()
    result = make(enter)
    result.sum().backward()
    took = time.perf_counter() - start
    X.grad = None
    return took


def settled(make, sizes, ops_of_one):
    """A step's time with ebb over eager's, by size. Both are minima, measured in turns, until the
    ratios are within ten percent of the first one's or many rounds have run.

    The time of an op in eager depends on the size too: no cache has room for 100,000 ops.
    """
    least = {}
    found = {}
    gc.collect()
    gc.disable()
    try:
        for done in range(60):
            for size in sizes:
                for enter in (eager, region):
                    for _ in range(max(1, 10_000 // (size * ops_of_one))):
                        took = seconds(partial(make, size), enter)
                        least[size, enter] = min(took, least.get((size, enter), took))
            found = {size: least[size, region] / least[size, eager] for size in sizes}
            if done >= 3 and max(found.values()) <= 1.1 * found[sizes[0]]:
                break
    finally:
        gc.enable()
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "sizes", "ops_of_one"),
    [
        (chain, [10, 100, 1_000, 10_000, 100_000], 1),
        (regions, [10, 100, 1_000, 10_000], OPS_OF_REGION),
        (batches, [1, 8, 32, 128], OPS_OF_REGION * REGIONS_OF_BATCH),
    ],
)
def test_time_per_op_does_not_grow(make, sizes, ops_of_one):
    found = settled(make, sizes, ops_of_one)

    assert max(found.values()) <= 1.1 * found[sizes[0]], found
