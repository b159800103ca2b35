"""RECOMPUTE_EACH_TIME, and what else may hold, move, write, ask or fail."""

from __future__ import annotations

import contextlib
from functools import partial

import pytest
import torch
from torch.nn import functional as F

import ebb
from ebb import OFFLOAD, RECOMPUTE_EACH_TIME, SAVE, Policy, _testing
from ebb_tests.exactness import leaves, like_eager, replayed, same_bits
from ebb_tests.memory_use import allocations
from ebb_tests.other_threads import run_in_threads
from ebb_tests.programs.each_time import (
    EACH_TIME,
    NBYTES,
    SIZE,
    chain,
    each_time,
    held_every,
    recipes_run,
    written,
)
from ebb_tests.programs.offloaded import finish_copies


def test_an_input_that_was_away_stays_for_the_recipes_that_need_it_again(accelerator):
    (x,) = leaves((64,))
    policy = Policy({"aten::mul": OFFLOAD}, default=RECOMPUTE_EACH_TIME, inputs=OFFLOAD)

    def program(x):
        h = x * 2
        for _ in range(4):
            h = h.sin()
        return h

    with ebb.region(policy):
        loss = program(x).sum()
    finish_copies(accelerator)
    found = torch.autograd.grad(loss, x)[0]

    assert same_bits(found, torch.autograd.grad(program(x).sum(), x)[0])
    assert accelerator.counts()["copies_in"] == 1


def test_what_the_policy_saves_in_between_stops_a_slice():
    (x,) = leaves((64,))
    policy = Policy({"aten::cos": SAVE}, default=RECOMPUTE_EACH_TIME)

    # exp's result, and sin's: from cos, which is saved.
    assert recipes_run(policy, lambda x: (x * 2).cos().sin().exp(), x) == 2 + 1 - 1 + 1


def test_a_leaf_that_changed_unseen_between_two_replays_is_an_error():
    x = torch.randn(8, requires_grad=True)
    factor = torch.randn(8)
    with ebb.region(EACH_TIME, name="block"):
        h = (x * 1).sin() * factor
        loss = h.sin().exp().sum()
    nodes = []
    node = loss.grad_fn
    while node is not None and not hasattr(node, "variable"):
        nodes.append(node)
        node = node.next_functions[0][0]
    del h
    assert nodes[1]._saved_result is not None
    factor.data.add_(1)
    with pytest.raises(RuntimeError, match="has changed since the forward"):
        torch.autograd.grad(loss, x)


@contextlib.contextmanager
def listed(values, value):
    """In the with-block, `value` is in the list `values`."""
    values.append(value)
    try:
        yield
    finally:
        values.clear()


class Fails(Exception):
    pass


calls_left = []  # not empty: how often the operator may still run before it fails


@torch.library.custom_op("ebb_each_time::copy", mutates_args=())
def copy(x: torch.Tensor) -> torch.Tensor:
    if calls_left:
        calls_left[0] -= 1
        if calls_left[0] < 0:
            raise Fails
    return x.clone()


copy.register_autograd(lambda ctx, gradient: gradient)


peeks = []  # to be called by the operator


@torch.library.custom_op("ebb_each_time::peek", mutates_args=())
def peek(x: torch.Tensor) -> torch.Tensor:
    for look in peeks:
        look()
    return x.clone()


peek.register_autograd(lambda ctx, gradient: gradient)

CUSTOM_TOO = Policy({"ebb_each_time::*": RECOMPUTE_EACH_TIME}, default=RECOMPUTE_EACH_TIME)


@pytest.mark.parametrize("calls", range(6))
@pytest.mark.parametrize("in_place", [True, False])
def test_an_attempt_that_fails_half_way_can_be_repeated(in_place, calls):
    (x,) = leaves((64,))

    def program(x):
        h = x * 2
        for _ in range(3):
            h = copy(h).neg_().mul_(0.1) if in_place else copy(h).neg() * 0.1
            h = h.sin()
        return h

    expected = torch.autograd.grad(program(x).sum(), x)[0]
    with ebb.region(CUSTOM_TOO):
        loss = program(x).sum()
    with listed(calls_left, calls), contextlib.suppress(Fails):
        torch.autograd.grad(loss, x, retain_graph=True)

    assert same_bits(torch.autograd.grad(loss, x)[0], expected)


def test_a_replay_that_fails_holds_nothing_of_what_it_made():
    x = torch.linspace(0, 1, SIZE, dtype=torch.float64, requires_grad=True)
    losses = []
    for _ in range(2):
        with ebb.region(CUSTOM_TOO):
            losses.append(copy(x.sin().sin()).sin().sum())

    def attempt():
        with contextlib.suppress(Fails):
            torch.autograd.grad(losses.pop(), x, retain_graph=True)

    with listed(calls_left, 0):
        attempt()  # loads what raising needs
        kept = losses[:]
        left = sum(allocations(attempt))

    assert abs(left) < NBYTES
    assert kept[0].grad_fn is not None


def test_a_kernel_may_ask_for_what_is_there_in_passing():
    """Then it is held, and is not lost when the recipe that needed it has run."""
    x, k = leaves((64,), (64,))

    def program(x, k):
        first = (x + 1).sin()
        product = first * k  # saves it
        second = peek(first)
        return product, second.sin(), second.neg().exp()

    expected = torch.autograd.grad(sum(o.sum() for o in program(x, k)), (x, k))
    with ebb.region(CUSTOM_TOO):
        outputs = program(x, k)
    node = outputs[0].grad_fn
    loss = sum(o.sum() for o in outputs)
    del outputs
    seen = []
    before = replayed()
    with listed(peeks, lambda: seen.append(node._saved_self)):
        found = torch.autograd.grad(loss, (x, k))

    assert all(map(same_bits, found, expected))
    assert all(same_bits(s.detach(), (x + 1).sin().detach()) for s in seen)
    # For exp: add, sin, peek, neg, exp. For the second sine: peek, and what it read is held. For
    # the first: add.
    assert replayed() - before == 5 + 1 + 1


def test_a_kernel_may_ask_for_it_and_let_it_go():
    """Before the slice that made it has ended."""
    x, k = leaves((64,), (64,))

    def program(x, k):
        first = (x + 1).sin()
        return first * k, peek(first).neg().exp().neg().exp()

    expected = torch.autograd.grad(program(x, k)[1].sum(), x)[0]
    for _ in range(20):
        with ebb.region(CUSTOM_TOO):
            product, y = program(x, k)
        holders = [product.grad_fn]
        loss = y.sum()
        del product, y

        def look(holders=holders):
            if holders:
                assert holders.pop()._saved_self is not None

        with listed(peeks, look):
            found = torch.autograd.grad(loss, x)[0]
        assert not holders
        assert same_bits(found, expected)


@pytest.mark.parametrize("writes", [True, False])
def test_a_kernel_may_ask_for_all_that_is_saved(writes):
    (x,) = leaves((64,))

    def program(x):
        h = x * 2
        first = (h + 1).sin()  # saves the sum
        second = peek(first).exp()
        h = h.neg_() if writes else h.neg()
        return second, (h.detach() * first).sin()

    expected = torch.autograd.grad(sum(o.sum() for o in program(x)), x)[0]
    with ebb.region(CUSTOM_TOO):
        outputs = program(x)
    nodes = {}
    pending = [o.grad_fn for o in outputs]
    while pending:
        node = pending.pop()
        nodes[node.name()] = node
        pending += [n for n, _ in node.next_functions if n is not None]
    loss = sum(o.sum() for o in outputs)
    del outputs
    saved_by = [node for name, node in nodes.items() if name.startswith(("Sin", "Mul"))]
    with listed(peeks, lambda: [node._saved_self for node in saved_by]):
        found = torch.autograd.grad(loss, x, retain_graph=True)[0]

    assert same_bits(found, expected)
    assert same_bits(torch.autograd.grad(loss, x)[0], expected)


@pytest.mark.parametrize("given", [EACH_TIME, each_time("aten::*_"), held_every(2)])
def test_verify_mode_compares_each_replay(given):
    (x,) = leaves((64,))
    with ebb.verify():
        assert recipes_run(given, written, x) > 0


@like_eager(EACH_TIME)
def test_double_backward(region):
    (x,) = leaves((8,))
    with region:
        y = (x * 2).sin().exp().tanh().sum()
    (first,) = torch.autograd.grad(y, x, create_graph=True)
    return torch.autograd.grad(first.square().sum(), x)[0]


def test_escapes_come_back():
    (x,) = leaves((64,))
    held = []

    def program(x):
        h = (x * 2).sin()
        held.append(h.cos())
        return held[-1].exp().sin()

    y = ebb.region(EACH_TIME, escapes="placeholder")(program)(x)
    kept = held[0]
    assert kept.untyped_storage().nbytes() == 0
    found = torch.autograd.grad(y.sum(), x)[0]

    assert same_bits(found, torch.autograd.grad(program(x).sum(), x)[0])
    assert same_bits(kept.detach(), held[1].detach())


def test_discarded_tensors_come_back():
    x, w = leaves((4, 3), (3, 3))
    expected = torch.autograd.grad((F.gelu(x * 2) @ w).sin().sum(), (x, w))
    with ebb.region(EACH_TIME):
        y = ebb.experimental.discardable(F.gelu(x * 2))
    z = y @ w
    ebb.experimental.discard(y, restore_at=z)
    found = torch.autograd.grad(z.sin().sum(), (x, w))

    assert all(map(same_bits, found, expected))


def test_backwards_of_several_threads():
    (x,) = leaves((256,))

    def program(x):
        h = x * 2
        outputs = []
        for i in range(6):
            h = (h.sin() + i).exp().tanh()
            outputs.append(h.cos())
        return outputs

    def differentiate(outputs, found, i):
        found[i] = torch.autograd.grad(outputs[i].sum(), x, retain_graph=True)[0]

    expected = {}
    eager = program(x)
    for i in range(6):
        differentiate(eager, expected, i)
    for _ in range(20):
        with ebb.region(EACH_TIME):
            outputs = program(x)
        found = {}
        run_in_threads(*(partial(differentiate, outputs, found, i) for i in range(6)))
        assert all(same_bits(found[i], expected[i]) for i in range(6))


def test_nothing_is_left(no_objects_left):
    for k in (1, 2, 3):
        x, loss = chain(ebb.region(held_every(k)))
        loss.backward()
        del loss, x


def test_a_report_tells_how_often_each_ran():
    with ebb.record_reports():
        _, loss = chain(ebb.region(EACH_TIME), 4)
        loss.backward()
        rows = [row for row in ebb.report().rows if row.op == "aten::sin.default" and row.replays]

    assert sum(row.replays for row in rows) == 1 + 2 + 3
    assert {row.fate for row in rows} == {"recomputed"}
    assert all(row.replay_seconds > 0 for row in rows)
    _testing.clear_reports()
