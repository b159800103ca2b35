"""Experts on both ranks: tokens go to them and come back by all-to-all."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ebb_tests.ranks.collectives import rank
from ebb_tests.ranks.comparing import assert_exact
from ebb_tests.ranks.experts import WAYS, Experts
from ebb_tests.ranks.models import step_in_a_region, train_steps
from ebb_tests.ranks.two_ranks import on_two_ranks


@pytest.mark.parametrize("how", WAYS)
@on_two_ranks
def test_one_region_around_two_layers(how):
    def train(inside):
        torch.manual_seed(20 + rank())
        model = nn.Sequential(*[Experts(how) for _ in range(2)])
        return train_steps(model, step_of=step_in_a_region(inside))

    assert_exact(train)
