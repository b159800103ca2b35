"""OFFLOAD: device memory, host memory, and what is on its way."""

from __future__ import annotations

from random import Random

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

import ebb
from ebb_tests.programs.offloaded import (
    OFFLOAD_ALL,
    SINES,
    chain_of_sines,
    finish_copies,
    gradients,
)
from ebb_tests.stand_ins import fake_accelerator


def saved_sine(x):
    """A cosine, and a watch on the memory of the sine that it saves."""
    h = x.sin()
    return h.cos(), StorageWeakRef(h.untyped_storage())


@pytest.mark.parametrize("advance", [0, 1000])
def test_device_memory_is_released_when_the_next_region_ends(advance, accelerator, x):
    """Done or not: the compute stream waits for the copy, and the host does not ask."""
    with ebb.region(SINES):
        y, watch = saved_sine(x)
    accelerator.advance(advance)
    assert not watch.expired()
    with ebb.region(SINES):
        z = y.sin().cos()

    assert watch.expired()
    assert accelerator.counts()["device_waits"] == (advance == 0)
    assert accelerator.counts()["asked"] == 0
    z.sum().backward()


def test_region_without_offload_releases_no_device_memory(accelerator, x):
    with ebb.region(SINES):
        y, watch = saved_sine(x)
    for _ in range(3):
        with ebb.region(SINES):
            y = y.tanh()

    assert not watch.expired()
    y.sum().backward()


def test_large_region_releases_device_memory_after_some_values(accelerator, x):
    with ebb.region(SINES):
        y, watch = saved_sine(x)
        y = chain_of_sines(y, 30)
        assert not watch.expired()
        y = chain_of_sines(y, 1)
        assert watch.expired()

    y.sum().backward()


def test_values_of_another_stream_are_released_when_a_region_ends_there(accelerator, x):
    with ebb.region(SINES):
        y, watch = saved_sine(x)
    accelerator.use_stream(1)
    for _ in range(3):
        with ebb.region(SINES):
            z = x.sin().cos()
    assert not watch.expired()
    accelerator.use_stream(0)
    with ebb.region(SINES):
        z = z + x.sin().cos()

    assert watch.expired()
    (y + z).sum().backward()


def test_backward_releases_a_value_when_it_unpacks_the_next(accelerator, x):
    y = x
    for _ in range(3):
        with ebb.region(SINES):
            y = y.sin().cos()
    last = y.grad_fn
    assert last._saved_self is not None
    assert ebb.stats()["offload"]["in_flight_bytes"] == x.nbytes
    before = last.next_functions[0][0].next_functions[0][0]
    assert before._saved_self is not None
    assert ebb.stats()["offload"]["in_flight_bytes"] == 0

    y.sum().backward()


def test_values_of_two_regions_are_fetched_ahead(accelerator, x):
    y = x
    for _ in range(6):
        with ebb.region(SINES):
            y = chain_of_sines(y, 2)
    finish_copies(accelerator)
    assert y.grad_fn._saved_self is not None

    assert accelerator.counts()["queued"] == 2 * 2
    y.sum().backward()


def test_tensor_in_flight_is_taken_from_the_device(accelerator, x):
    with ebb.region(SINES):
        y = x.sin().cos()
    y.sum().backward()
    accelerator.advance(1000)

    assert accelerator.counts()["copies_out"] == 1
    assert accelerator.counts()["copies_in"] == 0


@pytest.mark.parametrize("limit", [0, 100, 1000])
def test_bytes_in_flight_stay_below_the_limit(limit):
    x = torch.randn(4, dtype=torch.float64, requires_grad=True)  # 32 bytes
    with fake_accelerator(in_flight_bytes=limit) as fake:
        with ebb.region(OFFLOAD_ALL):
            y = x
            for _ in range(20):
                y = y.sin()
                now = ebb.stats()["offload"]["in_flight_bytes"]
                assert now <= limit
            assert fake.counts()["device_waits"] == {0: 19, 100: 16, 1000: 0}[limit]
        y.sum().backward()
        assert fake.counts()["host_waits"] == 0


@pytest.mark.parametrize("keep", [0, 1, 2, 5])
def test_keep_last_keeps_values_on_the_device(keep, x):
    with fake_accelerator(keep_last=keep) as fake:
        with ebb.region(OFFLOAD_ALL):
            y = x
            for _ in range(8):
                y = y.sin()
        finish_copies(fake)
        out = fake.counts()["copies_out"]
        y.sum().backward()
        assert out == 7 - keep
        assert fake.counts()["copies_in"] == out


def test_values_are_fetched_ahead_up_to_prefetch_bytes():
    x = torch.randn(4, dtype=torch.float64, requires_grad=True)
    with fake_accelerator(prefetch_bytes=64) as fake:  # two tensors
        with ebb.region(OFFLOAD_ALL):
            y = x
            for _ in range(8):
                y = y.sin()
        finish_copies(fake)
        before = ebb.stats()["offload"]["fetched_late"]
        assert y.grad_fn._saved_self is not None
        assert fake.counts()["queued"] == 2
        y.sum().backward()
        assert ebb.stats()["offload"]["fetched_late"] - before == 1


def test_value_that_backward_has_unpacked_is_not_fetched_ahead(accelerator, x):
    """It was asked for when it was away, and lived, so that nothing was copied."""
    with ebb.region(SINES):
        living = x.sin()
        first = living.cos()
        second = (x * 2).sin().cos()
    finish_copies(accelerator)
    assert torch.equal(first.grad_fn._saved_self, living)
    assert torch.equal(second.grad_fn._saved_self, (x * 2).sin())
    accelerator.advance(1000)

    assert accelerator.counts()["copies_in"] == 1


def test_host_memory_is_reused_and_has_the_exact_size():
    x = torch.randn(1000, requires_grad=True)
    with fake_accelerator() as fake:
        allocations = []
        for _ in range(5):
            with ebb.region(OFFLOAD_ALL):
                y = x.sin().cos()[:700].exp().sin()
            fake.advance(1000)
            y.sum().backward()
            fake.advance(1000)
            del y
            allocations.append(fake.counts()["host_allocations"])
        stats = ebb.stats()["offload"]
        assert allocations[1:] == allocations[1:2] * 4
        assert (
            stats["host_bytes_held"] == fake.counts()["host_bytes"] <= 1.05 * 4 * (2 * 1000 + 700)
        )
        assert stats["host_bytes_used"] == 0


def test_host_memory_is_reused_by_tensors_of_similar_sizes():
    """Sizes within a fifth, and with room for the largest: what replaced the first ones serves."""
    draw = Random(0)
    sizes = [draw.randint(3400, 4096) for _ in range(60)]
    with fake_accelerator(pinned_limit=5 * 4 * 4096) as fake:
        allocations = []
        for size in sizes:
            x = torch.randn(size, requires_grad=True)
            with ebb.region(OFFLOAD_ALL):
                y = x.sin().cos().exp().sin().cos()
            fake.advance(1000)
            y.sum().backward()
            fake.advance(1000)
            del y
            allocations.append(fake.counts()["host_allocations"])
        held = ebb.stats()["offload"]["host_bytes_held"]

    assert allocations[-1] == allocations[20]
    assert held <= 5 * 4 * 4096


def host_bytes_used(fake, x):
    """While a step of one sine is away."""
    with ebb.region(SINES):
        y = x.sin().cos()
    used = ebb.stats()["offload"]["host_bytes_used"]
    y.sum().backward()
    del y
    finish_copies(fake)
    return used


@pytest.mark.parametrize("size", [1, 7, 8, 9, 1000, 1023, 1025, 3999, 4001])
def test_reused_host_memory_is_at_most_a_quarter_too_large(size):
    """Without room for both, the first tensor's memory makes place for the second's."""
    with fake_accelerator(pinned_limit=4 * 5000) as fake:
        for length in (5000, size):
            used = host_bytes_used(fake, torch.randn(length, requires_grad=True))

    assert 4 * size <= used <= 4 * size * 5 / 4


def test_small_tensor_takes_no_large_host_buffer():
    with fake_accelerator() as fake:
        for length in (1000, 10):
            assert host_bytes_used(fake, torch.randn(length, requires_grad=True)) == 4 * length


@pytest.mark.parametrize("limit", [0, 100])
@pytest.mark.parametrize("least", ["the limit", "the host"])
def test_without_host_memory_values_are_recomputed_or_kept(limit, least):
    has = {"pinned_limit": limit} if least == "the limit" else {"host_bytes": limit}
    x = torch.randn(16, requires_grad=True)
    h = x * 2
    expected = gradients((x * 2).sin().cos().exp().sum(), x)[0]
    with fake_accelerator(**has) as fake:
        with ebb.region(OFFLOAD_ALL, "full"):
            y = h.sin().cos().exp()
        y.sum().backward()
        fake.advance(1000)
        counts = ebb.stats()["regions"]["full"]
        sent = limit // 64
        assert fake.counts()["copies_out"] == sent
        assert counts["bytes_offloaded"] == 64 * sent
        assert counts["bytes_fell_back"] == 64 * (4 - sent)
        assert counts["ops_replayed"] > 0
    assert torch.equal(x.grad, expected)
