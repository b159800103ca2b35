"""Ranks that are late at random: before collectives, in replays, and in replays ahead."""

from __future__ import annotations

import contextlib
import random
import time

import pytest
import torch
import torch.distributed as dist
from ahead_programs import delays, replays_ahead
from comparing import POLICIES, Way, assert_does_something, describe, plain
from exactness import same_bits
from stand_ins import kernel
from strategies import STRATEGIES, blocks_of
from two_ranks import on_two_ranks

import ebb
from ebb._region import repeated_collectives

BATCHES = 5
REPEATS = ("tensor", "megatron", "experts", "mixed")  # strategies with collectives in regions


def sleep(sleeps, most=1e-3):
    """Most often not at all."""
    if sleeps.random() < 0.2:
        time.sleep(sleeps.random() * most)


def sleep_around(model, sleeps):
    """Before each block, and before its backward."""

    def after(_module, _inputs, output):
        output.register_hook(lambda _: sleep(sleeps))

    for block in blocks_of(model):
        block.register_forward_pre_hook(lambda *_: sleep(sleeps))
        block.register_forward_hook(after)


def results_of(model, step_of, number):
    torch.manual_seed(number)
    model.zero_grad()
    results = {"loss": step_of(model, number)}
    results |= {name: parameter.grad for name, parameter in model.named_parameters()}
    return {name: plain(result) for name, result in results.items()}


def made(strategy, policy):
    torch.manual_seed(5)
    return STRATEGIES[strategy](Way(policy))


@contextlib.contextmanager
def comparisons():
    """ebb compares the ranks' collectives before it repeats those of a region."""
    calls, compare = [], repeated_collectives.compare

    def counted(*arguments):
        calls.append(arguments)
        return compare(*arguments)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(repeated_collectives, "compare", counted)
        yield calls


def steps_with_sleeps(strategy, policy, count):
    sleeps = random.Random(dist.get_rank())

    def gelu(x, **_):
        """In forwards and in replays."""
        sleep(sleeps)
        return x * torch.sigmoid(1.702 * x)

    ahead = [replays_ahead(2), delays(300)] if policy == "recompute_all" else []
    with contextlib.ExitStack() as stack:
        for context in [kernel("gelu", gelu), *ahead]:
            stack.enter_context(context)
        calls = stack.enter_context(comparisons())
        model, step_of = made(strategy, None)
        expected = [results_of(model, step_of, number) for number in range(BATCHES)]
        model, step_of = made(strategy, POLICIES[policy])
        sleep_around(model, sleeps)
        for step in range(count):
            number = step % BATCHES
            actual = results_of(model, step_of, number)
            differing = [k for k, v in expected[number].items() if not same_bits(actual[k], v)]
            assert not differing, (step, describe(differing, actual, expected[number]))
    assert_does_something(policy)
    repeats = policy == "recompute_collectives" and strategy in REPEATS
    assert len(calls) >= count if repeats else not calls
    if ahead:
        assert ebb.stats()["ahead"]["regions_in_time"] > 0


@pytest.mark.parametrize("policy", ["recompute_all", "recompute_collectives"])
@pytest.mark.parametrize("strategy", ["mixed", "megatron"])
@on_two_ranks
def test_some_steps(strategy, policy):
    steps_with_sleeps(strategy, policy, 20)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["recompute_all", "recompute_collectives"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@on_two_ranks
def test_a_thousand_steps(strategy, policy):
    steps_with_sleeps(strategy, policy, 1000)
