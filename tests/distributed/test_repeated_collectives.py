"""Collectives in replays: recomputed when a rule asks for it, in the same order on all ranks."""

from __future__ import annotations

import contextlib
import threading

import pytest
import torch
import torch.distributed as dist

import ebb
from ebb_tests.ranks.comparing import assert_exact
from ebb_tests.ranks.entries import Way
from ebb_tests.ranks.repeating import (
    COLLECTIVES,
    REPEATED,
    Exchange,
    after,
    inputs,
    region_of,
    stack,
)
from ebb_tests.ranks.two_ranks import on_two_ranks
from ebb_tests.stand_ins import fake_accelerator


@pytest.mark.parametrize("name", COLLECTIVES)
@on_two_ranks
def test_collective_is_recomputed(name):
    def train(inside):
        x = inputs()
        loss = region_of(inside, name, x)
        loss.backward()
        return {"loss": loss, "gradient": x.grad}

    assert_exact(train, ["recompute_collectives"])

    with ebb.record_reports():
        train(Way(REPEATED))
    rows = [(row.op, row.fate, row.reason) for row in ebb.report().rows]
    # The program's wait for gloo's reduce-scatter copies the sum, so copy_ makes the result.
    operator = "copy_" if name == "scattered" else "c10d"
    fates = {fate for op, fate, _ in rows if operator in op}
    # A thread of gloo may hold the result for some time.
    assert fates in ({"recomputed"}, {"escaped"}, {"recomputed", "escaped"}), rows


# A stack of layers


def trained(inside, depth=3, is_checked=False):
    """The model after a forward and its loss. Each layer is a region."""
    model = stack(depth)
    inside.apply(model, "*")
    with ebb.verify() if is_checked else contextlib.nullcontext():
        return model, model(inputs()).square().mean()


def gradients_of(model, loss):
    loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@on_two_ranks
def test_second_backward_repeats_no_collective():
    def train(inside):
        model, loss = trained(inside)
        loss.backward(retain_graph=True)
        first = ebb.stats()["total"]["ops_replayed"]
        gradients = gradients_of(model, loss)
        assert ebb.stats()["total"]["ops_replayed"] == first
        return gradients

    assert_exact(train, ["recompute_collectives"])


@on_two_ranks
def test_results_held_on_one_rank_are_repeated_on_both():
    """Values that a rank holds do not decide whether it repeats a collective."""
    held = []

    def train(inside):
        model = stack()
        inside.apply(model, "*")
        if dist.get_rank() == 0:
            for layer in model:
                layer.up.register_forward_hook(lambda *call: held.append(call[-1]))
        return gradients_of(model, model(inputs()).square().mean())

    assert_exact(train, ["recompute_collectives"])


@pytest.mark.parametrize("settings", [{"escapes": "placeholder"}, {"name": "all"}], ids=str)
@on_two_ranks
def test_one_region_around_all_layers(settings):
    def train(inside):
        model, x = stack(4), inputs()
        with inside.region(**settings):
            loss = model(x).square().mean()
        return gradients_of(model, loss) | {"input": x.grad}

    assert_exact(train, ["recompute_collectives"])


@pytest.mark.parametrize("host_bytes", [1 << 30, 0])
@on_two_ranks
def test_other_values_are_offloaded(host_bytes):
    """In the second case rank 1 has no host memory, and saves what rank 0 offloads."""
    rules = [*REPEATED.rules, ebb.Rule("aten::*", ebb.OFFLOAD, every=3)]

    def accelerator():
        return fake_accelerator(host_bytes if dist.get_rank() == 1 else 1 << 30, in_flight_bytes=0)

    policy = ebb.Policy(rules, inputs=ebb.OFFLOAD)
    assert_exact(lambda inside: gradients_of(*trained(inside)), [policy], accelerator)
    total = ebb.stats()["total"]
    has_memory = host_bytes > 0 or dist.get_rank() == 0
    assert total["bytes_offloaded" if has_memory else "bytes_fell_back"] > 0


@pytest.mark.parametrize("mode", ["ahead", "verify"])
@on_two_ranks
def test_collectives_are_repeated_ahead_and_under_verify(mode):
    def train(inside):
        is_checked = mode == "verify" and inside.policy is not None
        return gradients_of(*trained(inside, 6, is_checked))

    with ebb.config.patch(ahead_regions=2 if mode == "ahead" else 0):
        for _ in range(3):
            assert_exact(train, ["recompute_collectives"])


# Programs that are hard to replay


def dropped_in_backward(inside, x):
    """Rank 0 holds the result of the collective until backward has begun."""
    held = []
    with inside.region():
        y = Exchange.apply(x.sin(), "reduced")
        z = y.exp() * y
        if dist.get_rank() == 0:
            held.append(y.detach())
            z.register_hook(lambda gradient: held.clear())
        return (z.cos() * y.tanh()).sum()


def saved_and_then_overwritten(inside, x):
    with inside.region():
        y = (x * 2).detach()
        dist.all_reduce(y)
        z = x * y.cos()
        y.add_(1)
        return after(z * y.clone())


def backward_inside(inside, x):
    with inside.region():
        loss = after(Exchange.apply(x.sin(), "reduced"))
        loss.backward(retain_graph=True)
        return after(Exchange.apply(x.cos(), "exchanged"))


def twice_inside(inside, x):
    with inside.region():
        for name in ("reduced", "functional all_reduce"):
            after(Exchange.apply(x.sin(), name)).backward()
        return after(x)


PROGRAMS = (dropped_in_backward, saved_and_then_overwritten, backward_inside, twice_inside)
RULES = {"plain": [], "save": [("mul", ebb.SAVE)], "offload": [("mul", ebb.OFFLOAD)]}


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("program", PROGRAMS)
@on_two_ranks
def test_gradients_are_exact(program, rules):
    more = [ebb.Rule(f"aten::{name}", decision) for name, decision in RULES[rules]]

    def train(inside):
        x = inputs()
        program(inside, x).backward()
        return {"gradient": x.grad}

    assert_exact(train, [ebb.Policy([*REPEATED.rules, *more])])


@pytest.mark.sweep
@on_two_ranks
def test_many_steps_of_a_small_region():
    """gloo's thread may hold the forward's result while backward repeats the collective."""

    def train(inside):
        total = torch.zeros(())
        for _ in range(300):
            x = inputs()
            for name in ("reduced", "functional all_reduce"):
                region_of(inside, name, x).backward()
            total += x.grad.sum()
        return {"total": total}

    assert_exact(train, ["recompute_collectives"])


@on_two_ranks
def test_another_thread_may_draw_random_numbers():
    stop = threading.Event()

    def draw():
        while not stop.is_set():
            torch.rand(8)

    thread = threading.Thread(target=draw)
    thread.start()
    try:
        for _ in range(20):
            region_of(Way(REPEATED), "reduced", inputs()).backward()
    finally:
        stop.set()
        thread.join()
