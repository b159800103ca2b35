"""Ranks that are late at random: before collectives, in replays, and in replays ahead."""

from __future__ import annotations

import contextlib
import random
import time

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import ebb
from ebb._region import repeated_collectives
from ebb_tests.ranks import model_strategies  # noqa: F401
from ebb_tests.ranks.comparing import POLICIES, assert_does_something, difference_of, plain
from ebb_tests.ranks.entries import Way
from ebb_tests.ranks.strategies import STRATEGIES
from ebb_tests.ranks.two_ranks import on_two_ranks
from ebb_tests.replays import delays, replays_ahead
from ebb_tests.stand_ins import kernel

BATCHES = 5
# Strategies with collectives in regions, and others.
REPEAT = ("TP, sequence", "Megatron, plain", "experts, functional", "two groups")
OTHERS = ("DDP", "FSDP2", "1F1B")


def sleep(sleeps, most=1e-3):
    """Most often not at all."""
    if sleeps.random() < 0.2:
        time.sleep(sleeps.random() * most)


def blocks_of(model):
    """The modules that are regions."""
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    if isinstance(inner, torch.nn.ModuleList):
        inner = inner[0]  # a pipeline's stage
    return list(getattr(inner, "layers", inner))


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
    ebb.reset_stats()

    def gelu(x, **_):
        """In forwards and in replays."""
        sleep(sleeps)
        return x * torch.sigmoid(1.702 * x)

    ahead = [replays_ahead(2), delays(300)] if policy == "recompute_all" else []
    with contextlib.ExitStack() as stack:
        for context in [kernel("gelu", gelu), *ahead]:
            stack.enter_context(context)
        calls = stack.enter_context(comparisons())
        model, step_of, _ = made(strategy, None)
        expected = [results_of(model, step_of, number) for number in range(BATCHES)]
        model, step_of, _ = made(strategy, POLICIES[policy])
        sleep_around(model, sleeps)
        for step in range(count):
            number = step % BATCHES
            actual = results_of(model, step_of, number)
            difference = difference_of(actual, expected[number])
            assert not difference, f"step {step}: {difference}"
    assert_does_something(policy)
    repeats = policy == "recompute_collectives" and strategy in REPEAT
    assert len(calls) >= count if repeats else not calls
    regions = ebb.stats()["ahead"]
    if ahead:  # FSDP2 gathers parameters too late to recompute whole regions in time
        assert regions["regions_in_time"] + regions["regions_late"] + regions["regions_held"] > 0


@pytest.mark.parametrize("policy", ["recompute_all", "recompute_collectives"])
@pytest.mark.parametrize("strategy", ["two groups", "Megatron, plain"])
@on_two_ranks
def test_some_steps(strategy, policy):
    steps_with_sleeps(strategy, policy, 20)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["recompute_all", "recompute_collectives"])
@pytest.mark.parametrize("strategy", [*REPEAT, *OTHERS])
@on_two_ranks
def test_a_thousand_steps(strategy, policy):
    steps_with_sleeps(strategy, policy, 1000)
