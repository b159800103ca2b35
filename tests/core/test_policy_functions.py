"""The core asks a policy by its interface only: here a plain function."""

from __future__ import annotations

import zlib

import pytest
import torch

import ebb
from ebb import _testing

SAVE, RECOMPUTE, EACH_TIME = 0, 1, 4


def program(x):
    h = torch.nn.functional.gelu(x @ x)
    h = torch.nn.functional.dropout(h, 0.25) + h.sin()
    h[:2].mul_(0.5)
    return torch.softmax(h.cumsum(0), -1).square().sum()


def gradient(run):
    torch.manual_seed(3)
    x = torch.randn(8, 8, requires_grad=True)
    run(lambda: program(x)).backward()
    return x.grad


@pytest.mark.parametrize("number", range(20))
def test_any_function_gives_eagers_gradients(number):
    """A function of the operator's name, another one for each number."""

    def decide(op):
        return (SAVE, RECOMPUTE, EACH_TIME)[zlib.crc32(f"{number} {op}".encode()) % 3]

    expected = gradient(lambda run: run())
    assert torch.equal(gradient(lambda run: _testing.run_with_policy(decide, run)), expected)


def test_the_function_decides_what_is_replayed():
    asked = []

    def save(op):
        asked.append(op)
        return SAVE

    gradient(lambda run: _testing.run_with_policy(save, run))
    assert ebb.stats()["total"]["ops_replayed"] == 0
    assert "aten::mm.default" in asked

    gradient(lambda run: _testing.run_with_policy(lambda op: RECOMPUTE, run))
    assert ebb.stats()["total"]["ops_replayed"] > 5


def test_an_error_of_the_function_is_raised_and_leaves_no_region():
    def decide(op):
        raise KeyError(op)

    with pytest.raises(KeyError, match="aten::mm"):
        gradient(lambda run: _testing.run_with_policy(decide, run))
    assert ebb.stats()["open_regions"] == 0


@pytest.mark.skipif("offload" in ebb._C.plugins, reason="this build has a store for OFFLOAD")
def test_a_decision_without_a_store_raises():
    with pytest.raises(ValueError, match="has no plug-in 'offload'"):
        gradient(lambda run: _testing.run_with_policy(lambda op: 2, run))
