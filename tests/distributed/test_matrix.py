"""Every parallel strategy under every entry and policy: eager's bits on each rank.

Fast tests run one combination for each strategy. The sweep runs pairs: each strategy under each
entry and under each policy, and each entry under each policy. Slow tests run all combinations.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import tempfile

import pytest

import ebb
from ebb_tests.ranks import model_strategies  # noqa: F401
from ebb_tests.ranks.comparing import POLICIES, difference_of, prompt_accelerator, run
from ebb_tests.ranks.entries import ENTRIES, PLANNED_STEPS
from ebb_tests.ranks.models import STEPS
from ebb_tests.ranks.strategies import STRATEGIES
from ebb_tests.ranks.two_ranks import on_two_ranks
from ebb_tests.replays import replays_ahead


@contextlib.contextmanager
def disk():
    with tempfile.TemporaryDirectory() as folder:
        ebb.config.update(offload_disk=folder, offload_min_bytes=0)
        try:
            yield
        finally:
            ebb.config.offload.disk = ""


OFFLOAD_INPUTS = ebb.policies.offload_inputs
POLICIES_AND_SETTINGS = {
    name: (policy, prompt_accelerator) for name, policy in POLICIES.items()
} | {
    "torchtitan": (ebb.policies.torchtitan, contextlib.nullcontext),
    "disk": (OFFLOAD_INPUTS, disk),
    "verify": (ebb.policies.recompute_all, ebb.verify),
    "ahead": (ebb.policies.recompute_all, lambda: replays_ahead(2)),
}
# A budget chooses the policies itself.
WITH_POLICIES = [entry for entry in ENTRIES if entry != "EBB_BUDGET"]
ALL = [*itertools.product(WITH_POLICIES, POLICIES_AND_SETTINGS), ("EBB_BUDGET", "recompute_all")]


def pairs(strategy):
    """Combinations for this strategy, with each entry and each policy at least once."""
    shift = list(STRATEGIES).index(strategy)
    found = [
        (WITH_POLICIES[(shift + number) % len(WITH_POLICIES)], policy)
        for number, policy in enumerate(POLICIES_AND_SETTINGS)
    ]
    return [*found, ("EBB_BUDGET", "recompute_all")]


def missing(name):
    """What this policy should have done and has not."""
    stats = ebb.stats()
    total = stats["total"]
    # Replays ahead leave the last region as it is, which may be the only one.
    if total["ops_replayed"] + stats["ahead"]["regions_held"] == 0:
        return "nothing was recomputed"
    if name == "mixed" and total["bytes_offloaded"] == 0:
        return "nothing was offloaded"
    return ""


def check(strategy, combinations):
    def train(way):
        return STRATEGIES[strategy](way).run(way.steps)

    failures = []
    plain = functools.cache(lambda steps: run(train, None, "apply", steps))
    for entry, name in combinations:
        policy, settings = POLICIES_AND_SETTINGS[name]
        steps = PLANNED_STEPS if entry == "EBB_BUDGET" else STEPS
        expected = plain(steps)
        ebb.reset_stats()
        with settings():
            actual = run(train, policy, entry, steps)
        if difference := difference_of(actual, expected):
            failures.append(f"{entry}, {name}: {difference}")
        elif entry != "EBB_BUDGET" and (lack := missing(name)):
            failures.append(f"{entry}, {name}: {lack}")
    assert not failures, "\n".join(failures)


@pytest.mark.swept
@pytest.mark.parametrize("strategy", STRATEGIES)
@on_two_ranks
def test_one_combination(strategy):
    combinations = pairs(strategy)
    number = list(STRATEGIES).index(strategy) % len(combinations)
    check(strategy, [combinations[number]])


@pytest.mark.sweep
@pytest.mark.parametrize("strategy", STRATEGIES)
@on_two_ranks
def test_pairs(strategy):
    check(strategy, pairs(strategy))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
@on_two_ranks
def test_all_combinations(strategy):
    check(strategy, ALL)
