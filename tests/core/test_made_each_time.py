"""RECOMPUTE_EACH_TIME: made again for others in passing, and held only when backward asks for it.

See Note [Made each time].
"""

from __future__ import annotations

import contextlib
from itertools import accumulate

import pytest
import torch
from torch.nn import functional as F

import ebb
from ebb import RECOMPUTE, RECOMPUTE_EACH_TIME, SAVE, Policy, Rule
from ebb_tests.exactness import leaves, replayed, same_bits
from ebb_tests.memory_use import allocations, peak_bytes
from ebb_tests.programs.each_time import (
    ALL,
    COUNT,
    EACH_TIME,
    NBYTES,
    SIZE,
    WRITES,
    backward_of_chain,
    chain,
    each_time,
    held_every,
    recipes_run,
    written,
)

# How much memory


def test_nothing_but_what_is_wanted_is_held():
    expected, eager_peak = backward_of_chain(Policy(default=SAVE))
    found, peak = backward_of_chain(EACH_TIME)

    assert same_bits(found, expected)
    # One that is wanted; in eager all are there before.
    assert peak == eager_peak + NBYTES


@pytest.mark.parametrize("k", [2, 3, 4, 5])
def test_peak_is_below_that_of_recompute_all_by_what_is_not_held(k):
    expected, most = backward_of_chain(ALL)
    found, peak = backward_of_chain(held_every(k))

    assert same_bits(found, expected)
    # When the second sine's gradient is computed all below what was wanted first are there.
    held = {*range(k, COUNT - 1, k), COUNT - 2}
    assert peak == most - (COUNT - 2 - len(held)) * NBYTES


def test_a_slice_holds_two_values_at_a_time():
    _, loss = chain(ebb.region(EACH_TIME))
    node = loss.grad_fn.next_functions[0][0]

    peak = peak_bytes(lambda: node._saved_self)

    assert peak == 2 * NBYTES  # what the last recipe reads, and what it makes
    assert replayed() == COUNT - 1


def test_bytes_go_when_the_last_reader_has_run_and_not_before():
    a = torch.linspace(0, 3, SIZE, dtype=torch.float64, requires_grad=True)

    def program(x):
        early = x.detach().sin()  # read at once, and at the end
        h = early
        for _ in range(5):
            h = h.cos()
        return ((h + early) + x).exp()

    expected = program(a).detach()
    with ebb.region(EACH_TIME):
        y = program(a)
    node = y.grad_fn
    del y
    found = []
    peak = peak_bytes(lambda: found.append(node._saved_result))

    assert same_bits(found[0].detach(), expected)
    assert peak == 3 * NBYTES  # early, and two of the others


# How often


def test_each_unpack_runs_what_leads_to_it():
    _, loss = chain(ebb.region(EACH_TIME))
    loss.backward()

    assert replayed() == sum(range(COUNT))


NAMES = {"own names": lambda i: {"name": f"block{i}"}, "one name": lambda _: {"name": "block"}}


@pytest.mark.parametrize("names", [*NAMES.values(), lambda _: {}], ids=[*NAMES, "no names"])
def test_values_of_a_nested_region_stay_together_whatever_its_name(names):
    (x,) = leaves((8,))

    def program(x, enter):
        h = x
        for i in range(6):
            with enter(**names(i)):
                for _ in range(4):
                    h = h.sin()
        return h.sum()

    def each_time(**name):
        return ebb.region(EACH_TIME, **name)

    with each_time():
        loss = program(x, each_time)
    found = torch.autograd.grad(loss, x)[0]

    # One slice for each region. It ends with the last value that the region needs.
    assert replayed() == 23 + 20 + 16 + 12 + 8 + 4
    expected = torch.autograd.grad(program(x, lambda **_: contextlib.nullcontext()), x)[0]
    assert same_bits(found, expected)


@pytest.mark.parametrize("k", [2, 3, 5])
def test_what_is_held_is_made_once(k):
    _, loss = chain(ebb.region(held_every(k)))
    loss.backward()

    def runs(place):  # of the value after so many sines, from the nearest that is held below it
        return place - max(p for p in range(0, place, k))

    wanted = range(COUNT - 1, 0, -1)
    first = COUNT - 1  # makes all that are held
    assert replayed() == first + sum(runs(p) for p in wanted if p != first and p % k)


def test_retained_graphs_are_not_made_again():
    x, loss = chain(ebb.region(EACH_TIME))
    first = torch.autograd.grad(loss, x, retain_graph=True)
    once = replayed()
    second = torch.autograd.grad(loss, x)

    assert replayed() == once
    assert same_bits(*first, *second)


def test_two_functions_that_save_it_get_it_once():
    (x,) = leaves((8,))

    def program(x):
        h = x * 2
        return h.sin() + h.cos()

    assert recipes_run(EACH_TIME, program, x) == 1


# Operators with several results


def test_results_of_one_run_come_together_if_handles_wait_for_them():
    x, w = leaves((4, 8), (8,))

    def norm(x, w):
        return F.layer_norm(x * 2, (8,), w).sin()

    # For sin: mul, layer_norm. For layer_norm: mul, since its mean and deviation are there.
    assert recipes_run(EACH_TIME, norm, x, w) == 3


def test_a_mask_is_there_when_what_it_made_was_wanted():
    x = torch.randn(4, 8, requires_grad=True)

    def dropout(x):
        return torch.native_dropout(x * 2, 0.5, True)[0]

    assert recipes_run(EACH_TIME, lambda x: dropout(x).sin(), x) == 2
    # For sin: mul, dropout, exp. What dropout made nobody asks for, so it runs again for its mask.
    assert recipes_run(EACH_TIME, lambda x: dropout(x).exp().sin(), x) == 3 + 2


def test_attention_runs_once_more_and_not_for_each_of_its_results():
    x = torch.randn(2, 3, 8, 8, requires_grad=True)
    w = torch.randn(8, 24, requires_grad=True)

    def attention(x, w):
        q, k, v = (x @ w).chunk(3, -1)  # one value
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).sin()

    # For sin: the product and attention. For attention: the product.
    assert recipes_run(EACH_TIME, attention, x, w) == 3


@pytest.mark.parametrize("of_small_ones", [RECOMPUTE, SAVE, RECOMPUTE_EACH_TIME])
@pytest.mark.parametrize("of_large_ones", [RECOMPUTE, SAVE, RECOMPUTE_EACH_TIME])
def test_results_of_one_op_with_several_decisions(of_large_ones, of_small_ones):
    policy = Policy([Rule("*", of_small_ones, max_bytes=32)], default=of_large_ones)
    x, w = leaves((4, 4), (4, 4))

    def program(x, w):
        values, order = (x @ w).sort(-1)
        low, high = torch.var_mean(values.exp(), dim=-1)
        parts = torch._foreach_exp([values, low, high])
        return [p.sin() * p for p in parts] + [order * values]

    count = recipes_run(policy, program, x, w)

    assert count > 0 or SAVE in (of_large_ones, of_small_ones)


def test_a_result_that_nothing_needs_gets_no_memory():
    x = torch.randn(SIZE, dtype=torch.float64, requires_grad=True)
    with ebb.region(EACH_TIME):
        first, second = torch._foreach_sin([x.detach(), x.detach()])
        wanted = (first.cos() + x).exp()
        other = second.cos() * x  # saves what is made of the second
    del first, second
    node = wanted.grad_fn
    del wanted
    found = []
    sizes = allocations(lambda: found.append(node._saved_result))

    # Of the sines the second goes at once, and the first when its cosine is there.
    *_, bytes_after = accumulate(sizes)
    assert max(accumulate(sizes)) == 2 * NBYTES
    assert bytes_after == NBYTES
    assert other is not None


# Writes


@pytest.mark.parametrize("policy", WRITES.values(), ids=WRITES)
def test_states_before_a_write_are_never_lost(policy):
    (x,) = leaves((64,))

    recipes_run(policy, written, x)
    with ebb.region(policy):
        loss = written(x).sum()
    first = torch.autograd.grad(loss, x, retain_graph=True, create_graph=True)[0]
    second = torch.autograd.grad(first.sum(), x, retain_graph=True)[0]
    expected = torch.autograd.grad(written(x).sum(), x, create_graph=True)[0]

    assert same_bits(first, expected)
    assert same_bits(second, torch.autograd.grad(expected.sum(), x)[0])


def in_place_chain(x):
    h = x * 1
    kept = []
    for _ in range(4):
        h.exp_().mul_(0.1)
        kept.append(h.sin())  # saves this state
    return kept


def test_what_is_written_in_passing_is_not_copied():
    x = torch.linspace(0, 1, SIZE, dtype=torch.float64, requires_grad=True)
    with ebb.region(EACH_TIME):
        outputs = in_place_chain(x.detach())
        side = (outputs[-1].detach() + x).exp()
    del outputs
    node = side.grad_fn
    del side
    peak = peak_bytes(lambda: node._saved_result)

    # One buffer goes through all states; sin reads it, then add, then exp.
    assert peak == 2 * NBYTES


def test_a_state_that_is_held_is_copied_before_a_write_that_will_run_again():
    x = torch.linspace(0, 1, SIZE, dtype=torch.float64, requires_grad=True)

    def program(x):
        h = x * 2
        h.mul_(x.detach())
        return h.sin() * h.cos(), h.exp()

    policy = each_time("aten::mul_")
    expected = torch.autograd.grad(sum(o.sum() for o in program(x)), x)[0]
    with ebb.region(policy):
        first, second = program(x)
    a = torch.autograd.grad(first.sum(), x, retain_graph=True)[0]
    b = torch.autograd.grad(second.sum(), x)[0]

    assert torch.allclose(a + b, expected)
    recipes_run(policy, program, x)


def test_a_write_into_a_saved_value_is_saved():
    (x,) = leaves((64,))
    policy = Policy({"aten::mul.Tensor": SAVE}, default=RECOMPUTE_EACH_TIME)

    assert recipes_run(policy, lambda x: (x * 2).add_(1).sin(), x) == 0


# Random operators


@pytest.mark.parametrize("op", ["dropout", "bernoulli", "rand_like", "randn"])
def test_each_replay_draws_the_same(op):
    (x,) = leaves((16, 16))

    def program(x):
        h = x * 2
        for i in range(3):
            match op:
                case "dropout":
                    noise = F.dropout(h, 0.4)
                case "bernoulli":
                    noise = h * torch.bernoulli(h.detach().sigmoid())
                case "rand_like":
                    noise = h * torch.rand_like(h)
                case _:
                    noise = h + torch.randn(16, 16, dtype=h.dtype)
            h = noise.sin() + i
        return h

    state = torch.get_rng_state()
    assert recipes_run(EACH_TIME, program, x) > 9
    torch.set_rng_state(state)


def test_the_generator_goes_on_as_if_nothing_had_been_replayed():
    (x,) = leaves((16,))
    with ebb.region(EACH_TIME):
        loss = F.dropout(F.dropout(x * 2, 0.5).sin(), 0.5).exp().sum()
    before = torch.get_rng_state()
    loss.backward()

    assert torch.equal(torch.get_rng_state(), before)
