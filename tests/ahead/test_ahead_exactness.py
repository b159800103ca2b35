"""Replays ahead of backward: gradients have the bits of eager, whatever the program does."""

from __future__ import annotations

import contextlib
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ebb
from ebb_tests.other_threads import run_in_threads
from ebb_tests.programs.ahead import WaitInBackward, X, all_same, blocks, chain, counts, parameters
from ebb_tests.programs.compared_programs import run_random_programs
from ebb_tests.replays import replays_ahead

RECOMPUTE = ebb.policies.recompute_all


def gradients(program, region):
    """What `program(region)` gives, with gradients, twice: the second step finds a warm worker."""
    results = []
    for _ in range(2):
        torch.manual_seed(3)
        results += program(region)
        results.append(torch.rand(1))
    return results


def found_and_did(program):
    found = []
    did = counts(lambda: found.extend(gradients(program, lambda: ebb.region(RECOMPUTE))))
    return found, did


def assert_exact(program, *, replays=True, **settings):
    """Like eager, with as little and as much done ahead as can be."""
    expected = gradients(program, contextlib.nullcontext)
    for regions in (1, 3):
        with replays_ahead(regions, **settings):
            found, did = found_and_did(program)
        assert all_same(found, expected), did
        assert did["failures"] == 0
        assert not replays or did["regions_in_time"] > 0, did


def exact_ahead(count, dropout=0.0, *, replays=True):
    """Makes `program(region, modules, x)` a test: `assert_exact` of it, with so many blocks."""

    def make_test(program):
        def test():
            modules, x = blocks(count, dropout), torch.randn(X, requires_grad=True)
            assert_exact(lambda region: program(region, modules, x), replays=replays)

        test.__doc__ = program.__doc__
        return test

    return make_test


def backward(loss, modules, *more):
    wanted = [*parameters(modules), *more]
    return [loss.detach(), *torch.autograd.grad(loss, wanted, allow_unused=True)]


@exact_ahead(4)
def test_other_code_between_regions(region, modules, x):
    h = x
    for module in modules:
        with region():
            y = module(WaitInBackward.apply(h))
        h = (h + y.sin()) * 0.5
    return backward(h.sum(), modules, x)


@exact_ahead(4, dropout=0.4)
def test_dropout_draws_what_the_forward_drew(region, modules, x):
    return backward(chain(modules, x, region).sum(), modules, x)


def test_backward_draws_random_numbers_too():
    modules, x = blocks(4, dropout=0.4), torch.randn(X, requires_grad=True)
    drawn = []

    def program(region):
        h = x
        for module in modules:
            with region():
                h = module(h)
            h.register_hook(lambda g: (drawn.append(torch.rand(3)), g * torch.rand_like(g))[1])
        results = backward(h.sum(), modules, x)
        results += drawn
        drawn.clear()
        return results

    assert_exact(program, replays=False)


def test_draws_without_a_generator_are_left_to_backward():
    x = torch.randn(4, 4, requires_grad=True)

    def program(region):
        h = x
        for _ in range(3):
            with region():
                h = WaitInBackward.apply(h).sin()
                h = (h * torch.rand_like(h)).exp().sin()
        return [h.detach(), *torch.autograd.grad(h.sum(), x)]

    expected = gradients(program, contextlib.nullcontext)
    with replays_ahead():
        found, did = found_and_did(program)
    assert all_same(found, expected)
    assert did["regions_stopped"] > 0


def test_writes_in_place():
    x, w = torch.randn(5, 5, requires_grad=True), torch.randn(5, 5, requires_grad=True)

    def program(region):
        h = x
        for _ in range(4):
            with region():
                y = (WaitInBackward.apply(h) @ w).relu_()
                y = y.mul(2).add_(1).sigmoid_() * y
                y[1] = 0
                h = y + h
        return [h.detach(), *torch.autograd.grad(h.sum(), (x, w))]

    assert_exact(program)


def test_batch_norm_and_its_statistics():
    norms = [nn.BatchNorm1d(5) for _ in range(3)]
    x = torch.randn(8, 5, requires_grad=True)

    def program(region):
        h = x
        for norm in norms:
            norm.reset_running_stats()
            with region():
                h = norm(WaitInBackward.apply(h)).relu()
        results = [h.detach(), *torch.autograd.grad(h.square().sum(), x)]
        return results + [norm.running_var.clone() for norm in norms]

    assert_exact(program)


@exact_ahead(3)
def test_autocast(region, modules, x):
    with torch.autocast("cpu", torch.bfloat16):
        h = chain(modules, x, region)
    return backward(h.sum(), modules, x)


@exact_ahead(6)
def test_skips_across_regions(region, modules, x):
    h, skips = x, []
    for module in modules[:3]:
        with region():
            h = module(WaitInBackward.apply(h))
        skips.append(h)
    for module in modules[3:]:
        with region():
            h = module(WaitInBackward.apply(h) + skips.pop())
    return backward(h.sum(), modules, x)


@exact_ahead(6)
def test_branches_that_meet(region, modules, x):
    one = chain(modules[:3], x, region)
    other = chain(modules[3:], x * 2, region)
    return backward((one * other).sum(), modules, x)


def test_one_module_in_several_regions():
    (module,), x = blocks(1), torch.randn(X, requires_grad=True)
    assert_exact(lambda region: backward(chain([module] * 4, x, region).sum(), [module], x))


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_micro_batches(order):
    modules = blocks(3)
    xs = [torch.randn(X, requires_grad=True) for _ in order]

    def program(region):
        losses = [chain(modules, x, region).sum() for x in xs]
        return [r for i in order for r in backward(losses[i], modules, xs[i])]

    assert_exact(program)


def test_forwards_and_backwards_take_turns():
    modules = blocks(3)
    xs = [torch.randn(X, requires_grad=True) for _ in range(5)]

    def program(region):
        results, losses = [], []
        for x in xs:
            losses.append((chain(modules, x, region).sum(), x))
            if len(losses) == 3:
                loss, of = losses.pop(0)
                results += backward(loss, modules, of)
        for loss, of in losses:
            results += backward(loss, modules, of)
        return results

    assert_exact(program)


@exact_ahead(3)
def test_the_graph_is_retained(region, modules, x):
    loss = chain(modules, x, region).sum()
    wanted = [*parameters(modules), x]
    return [
        *torch.autograd.grad(loss, wanted, retain_graph=True),
        *torch.autograd.grad(loss, wanted, retain_graph=True),
        *torch.autograd.grad(loss, wanted),
    ]


def test_second_derivatives():
    x = torch.randn(6, 6, dtype=torch.float64, requires_grad=True)

    def program(region):
        h = x
        for _ in range(3):
            with region():
                h = (WaitInBackward.apply(h) @ h).tanh()
        (first,) = torch.autograd.grad(h.sum(), x, create_graph=True)
        return [first.detach(), *torch.autograd.grad(first.square().sum(), x)]

    assert_exact(program)


@exact_ahead(4)
def test_a_part_of_backward(region, modules, x):
    early = chain(modules[:2], x, region)
    loss = chain(modules[2:], early, region).sum()
    (first,) = torch.autograd.grad(loss, early, retain_graph=True)
    return [first, *backward(loss, modules, x)]


@exact_ahead(3)
def test_backward_in_a_region(region, modules, x):
    with region():
        inner = x.sin().exp()
        (found,) = torch.autograd.grad(inner.sum(), x)
    return [found, *backward(chain(modules, x + found, region).sum(), modules, x)]


def test_several_threads_each_with_a_model():
    models = [blocks(3) for _ in range(3)]
    xs = [torch.randn(X, requires_grad=True) for _ in models]

    def steps(i, region, results):
        for _ in range(4):
            h = xs[i]
            for module in models[i]:
                with region():
                    h = module(h)
            results[i] = backward(h.sum(), models[i], xs[i])

    def program(region):
        results = [None] * len(models)
        run_in_threads(*(partial(steps, i, region, results) for i in range(len(models))))
        return [r for result in results for r in result]

    assert_exact(program, replays=False)


def test_one_graph_from_two_backward_threads():
    modules = blocks(4)
    xs = [torch.randn(X, requires_grad=True) for _ in range(2)]

    def program(region):
        losses = [chain(modules, x, region).sum() for x in xs]
        results = [None, None]

        def run(i):
            results[i] = backward(losses[i], modules, xs[i])

        run_in_threads(partial(run, 0), partial(run, 1))
        return [r for result in results for r in result]

    assert_exact(program, replays=False)


def result_or_message(program):
    try:
        return program()
    except RuntimeError as error:
        return str(error)


def test_a_hook_writes_to_what_is_read_ahead():
    """Eager does not save the bias, so it gives a gradient; a replay must not see the write."""
    w, bias = torch.randn(8, 8, requires_grad=True), torch.randn(8)
    x = torch.randn(4, 8, requires_grad=True)

    def program(region, writes_at):
        own = bias.clone()
        h = x
        for i in range(4):
            with region():
                h = (F.linear(WaitInBackward.apply(h), w) + own).tanh().exp().log1p()
            if i == writes_at:
                h.register_hook(lambda g: (own.add_(1), g)[1])
        return [h.detach(), *torch.autograd.grad(h.sum(), (x, w))]

    def entered():
        return ebb.region(RECOMPUTE)

    for writes_at in range(4):
        expected = program(contextlib.nullcontext, writes_at)
        for regions in (1, 3):
            with replays_ahead(regions):
                found = result_or_message(lambda at=writes_at: program(entered, at))
            refused = isinstance(found, str) and "modified by an inplace operation" in found
            assert refused or all_same(found, expected)


class Burnt(Exception):
    pass


def test_an_exception_in_a_hook_loses_nothing():
    modules, x = blocks(4), torch.randn(X, requires_grad=True)

    def burn(gradient):
        raise Burnt

    def program(region):
        h = chain(modules, x, region)
        h.sum().backward()

    with replays_ahead():
        h = chain(modules[:2], x, lambda: ebb.region(RECOMPUTE))
        h.register_hook(burn)
        h = chain(modules[2:], h, lambda: ebb.region(RECOMPUTE))
        with pytest.raises(Burnt):
            h.sum().backward()
        del h
    assert_exact(lambda region: backward(chain(modules, x, region).sum(), modules, x))


def test_inference_mode_and_no_grad_leave_nothing():
    modules, x = blocks(3), torch.randn(X)
    with replays_ahead():
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                chain(modules, x, lambda: ebb.region(RECOMPUTE))
            assert ebb.stats()["ahead"]["bytes"] == 0


@pytest.mark.sweep
@pytest.mark.parametrize("under", ["ahead", "ahead at once"])
def test_random_programs_with_replays_ahead(under):
    assert run_random_programs(500, engine=under)["replayed"] > 150
