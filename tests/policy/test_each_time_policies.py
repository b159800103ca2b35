"""Policies with `RECOMPUTE_EACH_TIME`."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ebb
from ebb import RECOMPUTE, RECOMPUTE_EACH_TIME, Policy, Rule
from ebb_tests.exactness import leaves, replayed, same_bits
from ebb_tests.memory_use import peak_bytes
from ebb_tests.programs.each_time import ALL, EACH_TIME, recipes_run


def test_named_values_can_be_recomputed_once():
    (x,) = leaves((64,))
    policy = Policy([Rule("*", RECOMPUTE, name="stream")], default=RECOMPUTE_EACH_TIME)

    def program(x):
        h = ebb.checkpoint_name((x * 2).sin(), "stream")
        return h.cos().exp().sin()

    with_name = recipes_run(policy, program, x)
    without = recipes_run(EACH_TIME, program, x)

    assert with_name < without


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.up = nn.Linear(16, 64)
        self.down = nn.Linear(64, 16)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


def test_residual_stream_is_recomputed_once_and_the_rest_each_time():
    model = nn.Sequential(*(Block() for _ in range(4)))
    x = torch.randn(64, 16, requires_grad=True)
    stream = Policy({"aten::add.Tensor": RECOMPUTE}, default=RECOMPUTE_EACH_TIME)

    def step(policy):
        with ebb.region(policy):
            loss = model(x).square().mean()
        before = replayed()
        found = []
        peak = peak_bytes(lambda: found.extend(torch.autograd.grad(loss, [x, *model.parameters()])))
        return found, replayed() - before, peak

    expected, once, most = step(ALL)
    for policy in (stream, EACH_TIME):
        found, count, peak = step(policy)
        assert all(map(same_bits, found, expected))
        assert peak < most
        assert count > once
    assert step(stream)[1] < step(EACH_TIME)[1]


def test_decision_is_saved_and_loaded(tmp_path):
    policy = Policy([Rule("aten::mm", RECOMPUTE_EACH_TIME, every=2)], default=RECOMPUTE_EACH_TIME)
    text = policy.to_toml()
    read = tmp_path / "policy.toml"
    read.write_text(text)

    assert 'decision = "recompute_each_time"' in text
    assert 'default = "recompute_each_time"' in text
    assert Policy.load(read) == policy
    assert Policy.parse("mm:recompute_each_time").rules[0].decision is RECOMPUTE_EACH_TIME
    assert "RECOMPUTE_EACH_TIME by" in policy.explain("aten::mm.default")
    read.write_text('inputs = "recompute_each_time"')
    with pytest.raises(ValueError, match="inputs"):
        Policy.load(read)
    with pytest.raises(ValueError, match="inputs of a region cannot be recomputed"):
        Policy(inputs=RECOMPUTE_EACH_TIME)
