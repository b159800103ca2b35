"""The host asks nothing and waits for nothing."""

from __future__ import annotations

import contextlib
import random

import pytest
import torch

import ebb
from ebb_tests.programs.offloaded import (
    OFFLOAD_ALL,
    assert_exact,
    assert_nothing_is_away,
    check_random_schedule,
    drawn_settings,
    forward,
    gradients,
)
from ebb_tests.stand_ins import fake_accelerator


@pytest.mark.parametrize("in_flight", [0, 64, 1 << 30])
@pytest.mark.parametrize("prefetch", [0, 64, 1 << 30])
@pytest.mark.parametrize("keep", [0, 2])
def test_host_neither_polls_nor_waits(in_flight, prefetch, keep):
    x = torch.randn(8, requires_grad=True)
    settings = {"in_flight_bytes": in_flight, "prefetch_bytes": prefetch, "keep_last": keep}
    with fake_accelerator(**settings) as fake:
        allocations = []
        for _ in range(4):
            before = fake.counts()["asked"]
            assert_exact(forward(x, 6), x, 6)
            assert fake.counts()["asked"] == before
            assert fake.counts()["queued"] == 0  # all has come back to the compute stream
            allocations.append(fake.counts()["host_allocations"])
            assert_nothing_is_away()
        assert allocations[1:] == allocations[1:2] * 3
        assert fake.counts()["host_waits"] == 0


def test_device_memory_is_released_at_the_in_flight_limit():
    x = torch.randn(8, requires_grad=True)
    with fake_accelerator(in_flight_bytes=64) as fake:
        y = forward(x, 6)
        assert ebb.stats()["offload"]["in_flight_bytes"] <= 64
        assert fake.counts()["device_waits"] > 0
        gradients(y, x)


@pytest.mark.parametrize("seed", range(5))
def test_random_schedules_on_one_stream(seed):
    """On one stream, as in a capture."""
    draw = random.Random(seed)
    x = torch.randn(8, requires_grad=True)
    with fake_accelerator(**drawn_settings(draw)) as fake:
        check_random_schedule(draw, x, steps=1000, actions=["fail"], fake=fake)
        assert fake.counts()["asked"] == 0
        assert_nothing_is_away()


def test_write_to_an_offloaded_tensor():
    x = torch.randn(8, requires_grad=True)

    def program(region):
        with region:
            h = x * 2
            h.sin()  # sends h; nothing comes of it
            y = (h * 3).sin()
            with torch.no_grad():
                h.zero_()
        return gradients(y.sum(), x)[0]

    expected = program(contextlib.nullcontext())
    with fake_accelerator() as fake:
        assert torch.equal(program(ebb.region(OFFLOAD_ALL)), expected)
        assert fake.counts()["asked"] == 0


class Keeper(torch.nn.Module):
    def forward(self, x):
        self.hidden = (x * 2).sin() * 3
        return (self.hidden.cos() * 2).sin()


def test_value_fetched_ahead_is_dropped_if_its_tensor_is_alive():
    """It was fetched ahead, and then is not needed: its tensor lives."""
    x = torch.randn(1000, requires_grad=True)
    model = Keeper()
    expected = gradients(model(x).sum(), x)[0]
    with fake_accelerator(in_flight_bytes=0), ebb.apply(model, OFFLOAD_ALL, ""):
        for _ in range(3):
            assert torch.equal(gradients(model(x).sum(), x)[0], expected)
