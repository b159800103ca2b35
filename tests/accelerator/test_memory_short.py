"""Allocations for which a device has no room: see Note [Memory given back]."""

from __future__ import annotations

import contextlib
import gc

import pytest
import torch

import ebb
from ebb import _C
from ebb_tests import device as late
from ebb_tests.exactness import same_bits
from ebb_tests.programs.ahead import dropout_mlps, room

WIDTH, BLOCKS = 64, 6
MIB = 1 << 20


def model(device):
    return dropout_mlps(BLOCKS, WIDTH, dropout=0.2).to(device)


def inputs(device, rows=256):
    return torch.randn(rows, WIDTH).to(device)


def in_use():
    late.synchronize()
    gc.collect()
    return torch.ops.late.device_usage(0)


def gradients(net, x):
    net.zero_grad()
    torch.manual_seed(1)
    net(x).square().sum().backward()
    late.synchronize()
    return [p.grad.cpu() for p in net.parameters()]


def attempt(function):
    """None where memory is not enough."""
    try:
        return function()
    except torch.OutOfMemoryError:
        return None


def shortages():
    return _C.room_stats()["shortages"]


@pytest.mark.parametrize("delays", [False, True])
def test_step_succeeds_with_less_memory_than_kept_values_need(device, delays):
    net, x = model(device), inputs(device)
    expected = gradients(net, x)
    net.zero_grad()
    at_rest = in_use()
    limits = range(at_rest + MIB, at_rest + 6 * MIB, MIB // 4)
    before, came_through, plain = shortages(), 0, 0
    for limit in limits:
        with late.limited(device=limit):
            plain += attempt(lambda: gradients(net, x)) is not None
        net.zero_grad()

    with ebb.apply(net, ebb.policies.recompute_all, "[0-9]"):
        for limit in limits:
            delayed = late.delayed(50, 200) if delays else contextlib.nullcontext()
            with room(used=0), delayed, late.limited(device=limit):
                found = attempt(lambda: gradients(net, x))
            net.zero_grad()
            if found is not None:
                came_through += 1
                assert all(map(same_bits, found, expected)), limit
            assert in_use() <= at_rest  # what a test before this one left may go

    assert shortages() > before + 3
    assert came_through >= plain + 2


def test_a_replay_takes_what_another_graph_keeps(device):
    """Backward of the first replays while `other` keeps its values, which are larger."""
    net, x = model(device), inputs(device)
    other, large = model(device), inputs(device, rows=1024)
    expected = gradients(net, x), gradients(other, large)
    net.zero_grad()
    other.zero_grad()
    losses = []
    with (
        ebb.apply(net, ebb.policies.recompute_all, "[0-9]"),
        ebb.apply(other, ebb.policies.recompute_all, "[0-9]"),
    ):
        torch.manual_seed(1)
        losses.append(net(x).square().sum())  # keeps nothing
        with room(used=0):
            torch.manual_seed(1)
            losses.append(other(large).square().sum())
        before = _C.room_stats()
        with late.limited(device=in_use() + 300_000):
            for number, loss in enumerate(losses):
                loss.backward()
                late.synchronize()
                assert _C.room_stats()["regions_given_up"] > before["regions_given_up"], number

    for model_, right in zip((net, other), expected, strict=True):
        assert all(map(same_bits, [p.grad.cpu() for p in model_.parameters()], right))


def test_an_operator_waits_for_what_is_leaving(device):
    """Streams run when somebody waits, so nothing has left before."""
    x = torch.randn(256, 256).to(device).requires_grad_()

    def program():
        h = x
        for _ in range(8):
            h = (h.sin() * h.cos()).tanh()
        return h

    weight = torch.ones(256, 256).to(device)
    expected = torch.autograd.grad(program(), x, weight)[0].cpu()
    ebb.config.update(offload_min_bytes=1, offload_in_flight_bytes=1 << 30)
    at_rest = in_use()

    def in_a_region():
        with (
            late.limited(device=at_rest + 12 * x.nbytes),
            ebb.region(ebb.Policy(default=ebb.OFFLOAD)),
        ):
            return program()

    with late.without_free_memory_callback(), pytest.raises(torch.OutOfMemoryError):
        in_a_region()
    found = torch.autograd.grad(in_a_region(), x, weight)[0].cpu()

    assert same_bits(found, expected)


def test_with_replays_ahead_an_open_region_gives_up_what_it_holds(device, ahead):
    x = torch.randn(256, 256).to(device).requires_grad_()

    def program():
        h = x
        for _ in range(8):
            h = h.sin().exp().mul(0.5)
        return h.sum()

    expected = torch.autograd.grad(program(), x)[0].cpu()
    before, at_rest = _C.room_stats(), in_use()

    with late.limited(device=at_rest + 9 * x.nbytes):
        with ebb.region(ebb.policies.recompute_all):
            loss = program()
        given_up = _C.room_stats()["regions_given_up"] - before["regions_given_up"]
    found = torch.autograd.grad(loss, x)[0].cpu()

    assert given_up > 0
    assert same_bits(found, expected)


def test_a_random_operator_that_fails_draws_what_it_would_have_drawn(device):
    """Dropout draws before it allocates the last of its results."""
    x = torch.randn(256, 256).to(device).requires_grad_()

    def program():
        torch.manual_seed(4)
        kept = x.sin().exp().mul(2)
        with ebb.region(ebb.policies.recompute_all):
            return kept, torch.nn.functional.dropout(x.cos(), 0.5)

    expected = torch.autograd.grad(program()[1].sum(), x)[0].cpu()
    state = torch.late.get_rng_state(0)
    at_rest = in_use()
    came_through = 0
    for spare in range(1, 10):
        with room(used=0):
            with ebb.region(ebb.policies.recompute_all):
                other = x.sin().exp().mul(2).exp()
            with late.limited(device=at_rest + spare * x.nbytes):
                dropped = attempt(lambda: program()[1])
        if dropped is not None:
            came_through += 1
            found = torch.autograd.grad(dropped.sum(), x)[0].cpu()
            assert same_bits(found, expected), spare
            assert torch.equal(torch.late.get_rng_state(0), state)
        del dropped, other
    assert came_through > 2
