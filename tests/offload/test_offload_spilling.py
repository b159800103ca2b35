"""The disk tier behind pinned memory."""

from __future__ import annotations

import os
import random
import time
from types import SimpleNamespace

import pytest
import torch

import ebb
from ebb import _testing
from ebb_tests.disk_tier_files import descriptor_of_the_file, full_disk, replaced_by
from ebb_tests.programs.offloaded import (
    OFFLOAD_ALL,
    SINES,
    assert_exact,
    chain_of_sines,
    check_random_schedule,
    finish_copies,
    forward,
    gradients,
)
from ebb_tests.stand_ins import fake_accelerator

MIB = 1 << 20


@pytest.fixture
def x():
    return torch.randn(1000, requires_grad=True)


@pytest.mark.parametrize("prefetch", [0, 1 << 40])
@pytest.mark.parametrize("length", [4, 30])
def test_values_without_room_in_pinned_memory_go_to_disk(tmp_path, length, prefetch, x):
    with fake_accelerator(disk=tmp_path, pinned_limit=20_000, prefetch_bytes=prefetch) as fake:
        for _ in range(2):
            y = forward(x, length, name="spills")
            assert ebb.stats()["offload"]["host_bytes_held"] <= 20_000
            transfers = ebb.stats()["transfers"]["spills"]
            spilled = sum(counts["bytes_spilled"] for counts in transfers.values())
            assert spilled >= 4000 * (2 * length - 1 - 5)
            assert not any(counts["bytes_fell_back"] for counts in transfers.values())
            finish_copies(fake)
            assert_exact(y, x, length)
            assert ebb.stats()["offload"]["host_bytes_held"] <= 20_000
        del y
        _testing.drain_offload()
        stats = ebb.stats()["offload"]
        assert stats["stashes"] == stats["host_bytes_used"] == stats["disk_bytes_used"] == 0
        assert ebb.stats()["total"]["ops_replayed"] == 0


@pytest.mark.parametrize("seed", range(5))
def test_random_schedules_with_spilling(tmp_path, seed):
    draw = random.Random(seed)
    x = torch.randn(1000, requires_grad=True)
    settings = {
        "disk": tmp_path,
        "disk_limit": draw.choice([40_960, 64 * MIB]),
        "pinned_limit": draw.choice([4000, 13_000, 50_000]),
        "prefetch_bytes": draw.choice([0, 8000, MIB]),
        "in_flight_bytes": draw.choice([0, 8000, MIB]),
        "keep_last": draw.choice([0, 2]),
    }
    with fake_accelerator(**settings) as fake:
        check_random_schedule(draw, x, steps=300, longest=8, actions=["advance"], fake=fake)
        _testing.drain_offload()
        stats = ebb.stats()["offload"]
        assert stats["stashes"] == stats["host_bytes_used"] == 0


def test_living_tensor_is_spilled(tmp_path, x):
    with fake_accelerator(disk=tmp_path, pinned_limit=8000) as fake:
        with ebb.region(OFFLOAD_ALL):
            first = x.sin()
            y = chain_of_sines(first, 6).sum()
            fake.advance(1 << 30)
        assert torch.equal(gradients(y, x)[0], gradients(chain_of_sines(x.sin(), 6).sum(), x)[0])


AT_ONCE = 4  # an eighth of what there is room for, so that the next ones need not wait


@pytest.fixture
def spilling(tmp_path):
    """An accelerator, functions that saved what has left it, and of that what lives. The first four
    are on their way to disk: one has been waited for, and the others take some milliseconds."""
    x, y = (torch.randn(size, requires_grad=True) for size in (MIB // 2, 1))
    room = 8 * AT_ONCE * x.nbytes
    with fake_accelerator(disk=tmp_path, pinned_limit=room, prefetch_bytes=0) as fake:
        with ebb.region(SINES):
            living = [(x + i).sin() for i in range(8 * AT_ONCE)]
            values = [h.cos() for h in living]
            finish_copies(fake)
            before = ebb.stats()["offload"]["host_waits"]
            values.append(y.sin().cos())  # needs room
            waits = ebb.stats()["offload"]["host_waits"] - before
        yield SimpleNamespace(fake=fake, values=values, living=living, waits=waits)
        living.clear()
        found = gradients(sum(value.sum() for value in values), [x, y])
        expected = sum((x + i).sin().cos().sum() for i in range(8 * AT_ONCE)) + y.sin().cos()
        assert all(map(torch.equal, found, gradients(expected, [x, y])))


def test_four_values_are_written_at_once_and_the_first_is_waited_for(spilling):
    spilling.living.clear()
    nbytes = [value.nbytes for value in spilling.values]
    _testing.drain_offload()
    stats = ebb.stats()["offload"]

    assert spilling.waits == 1
    assert stats["disk_bytes_used"] == sum(nbytes[:AT_ONCE])
    assert stats["host_bytes_used"] == sum(nbytes[AT_ONCE:])


def test_drain_waits_for_reads_ahead(spilling):
    """All of it, since others have taken all the room, and are gone."""
    *large, small = spilling.values
    spilling.living.clear()
    x = torch.randn(large[0].shape, requires_grad=True)
    with ebb.region(SINES):
        others = [(x + i).sin().cos() for i in range(len(large))]
    _testing.drain_offload()
    del others
    assert ebb.stats()["offload"]["disk_bytes_used"] >= sum(value.nbytes for value in large)
    ebb.config.offload.prefetch_bytes = 1 << 30
    kept = small.grad_fn._saved_self  # there is room for all then
    _testing.drain_offload()

    assert ebb.stats()["offload"]["disk_bytes_used"] == 0
    del kept


def test_living_tensor_is_served_while_it_is_written(spilling):
    of_disk = zip(spilling.values[:AT_ONCE], spilling.living[:AT_ONCE], strict=True)
    for value, h in of_disk:
        assert value.grad_fn._saved_self.data_ptr() == h.data_ptr()
    _testing.drain_offload()

    assert ebb.stats()["offload"]["disk_bytes_used"] == 0


def test_unpacking_waits_for_a_write(tmp_path, spilling):
    """Then its memory may be used for something else, or go."""
    spilling.living.clear()
    other = tmp_path / "other"
    other.touch()
    descriptor = descriptor_of_the_file(tmp_path)
    kept = spilling.values[AT_ONCE - 1].grad_fn._saved_self
    with replaced_by(other, descriptor, os.O_RDWR):
        time.sleep(0.1)

    assert other.stat().st_size == 0
    del kept


def test_failed_write_keeps_the_tensor_in_pinned_memory(tmp_path, x):
    with fake_accelerator(disk=tmp_path, pinned_limit=12_000) as fake:
        with full_disk(tmp_path, x) as caught:
            y = forward(x, 6)
            fake.advance(1 << 30)
        assert len(caught) == 1
        assert "stays in host memory: writing 4000 bytes" in str(caught[0].message)
        assert_exact(y, x, 6)
