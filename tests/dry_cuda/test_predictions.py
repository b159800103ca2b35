"""A plan's prediction is what torch's CUDA allocator counts."""

from __future__ import annotations

import pytest
import torch

import ebb
from ebb_tests.dry_cuda.models import KINDS, Training

CLOSE = 0.01


def peak_of(training: Training) -> int:
    """The bytes that a step allocates, as torch's allocator counts, without older gradients."""
    training.step()
    training.model.zero_grad(set_to_none=True)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    training.step()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("share", [1.0, 0.8, 0.6, 0.4])
@pytest.mark.parametrize("kind", KINDS)
def test_predicted_peak_is_the_measured_peak(kind, share):
    training = Training(kind)
    training.step()

    plan = ebb.plan(training.model, training.step, share)
    with plan.apply(training.model):
        measured = peak_of(training)

    assert abs(plan.peak - measured) <= CLOSE * measured


@pytest.mark.parametrize("kind", KINDS)
def test_plan_keeps_to_its_budget(kind):
    training = Training(kind)
    training.step()
    eager = ebb.plan(training.model, training.step, 1.0).peak

    plan = ebb.plan(training.model, training.step, 0.5)
    with plan.apply(training.model):
        measured = peak_of(training)

    assert measured <= 0.5 * eager * (1 + CLOSE)
