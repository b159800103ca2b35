"""OFFLOAD: device memory, host memory, and what is on its way."""

from __future__ import annotations

from random import Random

import pytest
import torch
from offloading import OFFLOAD_ALL, SINES, finish_copies, gradients
from stand_ins import fake_accelerator
from torch.multiprocessing.reductions import StorageWeakRef

import ebb


def test_device_memory_lives_until_its_copy_is_done_and_no_longer(accelerator, x):
    with ebb.region(SINES):
        h = x.sin()
        watch = StorageWeakRef(h.untyped_storage())
        y = h.cos()
        del h
        assert not watch.expired()
        accelerator.advance(1)
    ebb.stats()["offload"]  # looks for copies that are done, as each pack and unpack does

    assert watch.expired()
    y.sum().backward()


def test_a_tensor_in_flight_is_served_from_the_device(accelerator, x):
    with ebb.region(SINES):
        y = x.sin().cos()
    y.sum().backward()
    accelerator.advance(1000)

    assert accelerator.counts()["copies_out"] == 1
    assert accelerator.counts()["copies_in"] == 0


@pytest.mark.parametrize("limit", [0, 100, 1000])
def test_no_more_than_the_limit_is_in_flight(limit):
    x = torch.randn(4, dtype=torch.float64, requires_grad=True)  # 32 bytes
    with fake_accelerator(in_flight_bytes=limit) as fake:
        with ebb.region(OFFLOAD_ALL):
            y = x
            for _ in range(20):
                y = y.sin()
                now = ebb.stats()["offload"]["in_flight_bytes"]
                assert now <= limit
        y.sum().backward()
        assert fake.counts()["host_waits"] == (0 if limit == 1000 else 19 if limit == 0 else 16)


@pytest.mark.parametrize("keep", [0, 1, 2, 5])
def test_the_last_ones_stay_on_the_device(keep, x):
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


def test_what_was_sent_before_is_fetched_ahead():
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


def test_what_was_taken_is_not_fetched_ahead(accelerator, x):
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


def test_host_memory_is_used_again_and_has_the_exact_size():
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


def test_memory_is_used_again_though_each_step_has_other_sizes():
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


@pytest.mark.parametrize("size", [1, 7, 8, 9, 1000, 1023, 1025, 3999, 4001])
def test_memory_that_is_used_again_or_replaced_is_a_quarter_larger_at_most(size):
    """Without room for both, the first tensor's memory makes place for the second's."""
    with fake_accelerator(pinned_limit=4 * 5000) as fake:
        for length in (5000, size):
            x = torch.randn(length, requires_grad=True)
            with ebb.region(SINES):
                y = x.sin().cos()
            used = ebb.stats()["offload"]["host_bytes_used"]
            y.sum().backward()
            del y
            finish_copies(fake)

    assert 4 * size <= used <= 4 * size * 5 / 4


def test_a_small_tensor_takes_no_large_buffer():
    x = torch.randn(1000, requires_grad=True)
    with fake_accelerator() as fake:
        for part in (x, x[:10]):
            with ebb.region(OFFLOAD_ALL):
                y = part.sin().cos()
            used = ebb.stats()["offload"]["host_bytes_used"]
            assert used == 4 * part.numel()
            y.sum().backward()
            del y
            finish_copies(fake)


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
