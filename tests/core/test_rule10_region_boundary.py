"""Rule 10: a storage first met in a region is a leaf there; nesting moves no boundary."""

from __future__ import annotations

import pytest
import torch

import ebb
from ebb_tests.exactness import exact, replayed

pytestmark = pytest.mark.engines("exactness", "device", "checked")


@pytest.mark.replays
def test_what_was_made_outside_is_not_recomputed():
    x = torch.randn(3, requires_grad=True)
    h = (x * 2).exp()

    with ebb.region():
        loss = (h + 1).sin().sum()
    ebb.reset_stats()
    loss.backward()

    assert replayed() == 1  # the add


@pytest.mark.replays
def test_regions_in_a_row_are_independent():
    x = torch.randn(3, requires_grad=True)
    h = x
    for _ in range(4):
        with ebb.region():
            h = (h * 2).tanh().exp().sin()
    ebb.reset_stats()
    h.sum().backward()

    assert replayed() == 4 * 3  # the last op of each region is needed by nobody


def test_inner_regions_change_policy_and_name_only():
    x = torch.randn(8, requires_grad=True)

    with ebb.region(ebb.policies.recompute_all, "outer"):
        h = (x * 2).exp()
        with ebb.region(ebb.policies.save_all, "inner"):
            h = (h + 1).tanh()
        h = (h * 3).sin()
        loss = h.sum()
    loss.backward()

    regions = ebb.stats()["regions"]
    assert regions["outer"]["bytes_dropped"] > 0
    assert regions["inner"]["bytes_saved"] > 0
    assert regions["inner"]["bytes_dropped"] == 0


@exact((4, 4))
def test_nested_regions_are_exact(x):
    policies = [ebb.policies.save_all, ebb.policies.recompute_all, ebb.policies.save_matmuls]
    h = (x * 2).exp()
    for policy in policies:
        with ebb.region(policy):
            h = (h @ h.t()).tanh()
            with ebb.region(policies[0]):
                h = torch.nn.functional.dropout(h, 0.2).sin_()
        h = h * 2 + 1
    return h
