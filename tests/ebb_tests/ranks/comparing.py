"""Comparing a training in regions with plain eager, bit for bit, on this rank."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist

import ebb
from ebb._launch import takeover
from ebb_tests.exactness import same_bits
from ebb_tests.ranks.entries import Way
from ebb_tests.ranks.models import plain
from ebb_tests.ranks.two_ranks import on_two_ranks
from ebb_tests.stand_ins import fake_accelerator

POLICIES = {
    "recompute_all": ebb.policies.recompute_all,
    "save_matmuls": ebb.policies.save_matmuls,
    "recompute_collectives": ebb.policies.recompute_collectives,
    "mixed": ebb.Policy(
        {
            "aten::*mm": ebb.OFFLOAD,
            "aten::mul": ebb.OFFLOAD,
            "aten::gelu": ebb.SAVE,
            "aten::sin": ebb.SAVE,
        },
        inputs=ebb.OFFLOAD,
    ),
}

Results = dict[str, Any]


def run(train: Callable[[Way], Results], policy: ebb.Policy | None, *entry: Any) -> Results:
    """What `train` gives, by name. `entry`: further arguments of `Way`."""
    torch.manual_seed(3)
    try:
        results = {name: plain(result) for name, result in train(Way(policy, *entry)).items()}
    finally:
        takeover.remove()
    return results | {"random state": torch.rand(1)}


def prompt_accelerator() -> AbstractContextManager[object]:
    return fake_accelerator(in_flight_bytes=0)


def assert_exact(
    train: Callable[[Way], Results],
    policies: Iterable[str | ebb.Policy] = tuple(POLICIES),
    accelerator: Callable[[], AbstractContextManager[object]] = prompt_accelerator,
) -> None:
    """`train` gives the same bits under each policy as in eager, and each policy does something.

    Args:
        train: makes what it trains, and gives what it found, by name.
        policies: names in POLICIES, or policies.
        accelerator: to which values leave; default: a fake one, as soon as can be.
    """
    expected = run(train, None)
    for policy in policies:
        ebb.reset_stats()
        with accelerator():
            actual = run(train, POLICIES[policy] if isinstance(policy, str) else policy)
        difference = difference_of(actual, expected)
        assert not difference, f"policy {policy}: {difference}"
        assert_does_something(policy)


def gradient_of(program: Callable[[torch.Tensor, Way], torch.Tensor]) -> Callable[[Way], Results]:
    """A training that differentiates what the program makes of an input, another on each rank."""

    def train(inside: Way) -> Results:
        torch.manual_seed(dist.get_rank())
        x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
        loss = program(x, inside).sum()
        return {"loss": loss, "gradient": torch.autograd.grad(loss, x)[0]}

    return train


def compared_with_eager(*policies: str | ebb.Policy, **settings: Any) -> Callable[..., Any]:
    """Makes a program a test on two ranks: `assert_exact` of its gradient.

    The program gets an input, the :class:`Way`, and the parameters of the test.
    """

    def decorate(program: Callable[..., torch.Tensor]) -> Callable[..., None]:
        @functools.wraps(program)
        def test(**arguments: Any) -> None:
            train = gradient_of(functools.partial(program, **arguments))
            assert_exact(train, policies or tuple(POLICIES), **settings)

        signature = inspect.signature(program)
        parameters = list(signature.parameters.values())[2:]
        test.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return on_two_ranks(test)

    return decorate


def difference_of(actual: Results, expected: Results) -> str:
    """In words; empty if both have the same bits."""
    differing = [
        key
        for key in expected.keys() | actual.keys()
        if not same_bits(actual.get(key), expected.get(key))
    ]
    if not differing:
        return ""
    first = min(differing)
    names = ", ".join(sorted(differing)[:8])
    return (
        f"{len(differing)} differ ({names}): {actual.get(first)} instead of {expected.get(first)}"
    )


def assert_does_something(policy: str | ebb.Policy) -> None:
    total = ebb.stats()["total"]
    offloads = isinstance(policy, ebb.Policy) and policy.default == ebb.OFFLOAD
    if policy == "mixed" or offloads:
        assert total["bytes_offloaded"] > 0, "nothing was offloaded"
    if not offloads:
        assert total["ops_replayed"] > 0, f"nothing was recomputed under {policy}"
