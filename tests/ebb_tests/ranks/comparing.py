"""Comparing a training in regions with plain eager, bit for bit, on this rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed._functional_collectives as funcol

import ebb
from ebb._launch import takeover
from ebb_tests.exactness import same_bits
from ebb_tests.ranks.entries import Way
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


def plain(result: Any) -> torch.Tensor | None:
    if hasattr(result, "to_local"):
        result = result.to_local()
    if isinstance(result, funcol.AsyncCollectiveTensor):
        result = result.wait()
    return result if result is None else torch.as_tensor(result).detach().clone()


def prompt_accelerator() -> AbstractContextManager[object]:
    return fake_accelerator(in_flight_bytes=0)


def assert_exact(
    train: Callable[[Way], Results],
    policies: Iterable[str] = tuple(POLICIES),
    accelerator: Callable[[], AbstractContextManager[object]] = prompt_accelerator,
) -> None:
    """`train` gives the same bits under each policy as in eager, and each policy does something.

    Args:
        train: makes what it trains, and gives what it found, by name.
        policies: of POLICIES.
        accelerator: to which values leave; default: a fake one, as soon as can be.
    """
    expected = run(train, None)
    for name in policies:
        ebb.reset_stats()
        with accelerator():
            actual = run(train, POLICIES[name])
        difference = difference_of(actual, expected)
        assert not difference, f"policy {name}: {difference}"
        assert_does_something(name)


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


def assert_does_something(policy: str) -> None:
    total = ebb.stats()["total"]
    if policy == "mixed":
        assert total["bytes_offloaded"] > 0, "nothing was offloaded"
    assert total["ops_replayed"] > 0, f"nothing was recomputed under {policy}"
