"""fairscale's checkpoint_wrapper under EBB=1: its calls become regions."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ebb
from ebb._launch import takeover

checkpoint_wrapper = pytest.importorskip(
    "fairscale.nn.checkpoint", reason="needs fairscale"
).checkpoint_wrapper


class Block(nn.Module):
    """A block with a keyword argument and BatchNorm, whose statistics must change once."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(16)
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x, *, scale=1.0):
        return x + scale * self.dropout(self.down(self.up(self.norm(x)).relu()))


def train(wrap):
    torch.manual_seed(1)
    blocks = [Block() for _ in range(3)]
    model = nn.ModuleList(wrap(block) for block in blocks)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        x = torch.randn(8, 16)
        for block in model:
            x = block(x, scale=0.5)
        loss = x.square().mean()
        optimizer.zero_grad()
        loss.backward()
        losses.append(loss.detach())
        gradients = [parameter.grad for parameter in model.parameters()]
        optimizer.step()
    return [*losses, *gradients, *model.state_dict().values()]


@pytest.fixture
def taken_over():
    takeover.install(ebb.policies.recompute_all, "1", ())
    yield
    takeover.remove()


@pytest.mark.usefixtures("taken_over")
def test_blocks_are_regions(capfd):
    expected = train(lambda block: block)
    ebb.reset_stats()

    found = train(checkpoint_wrapper)

    assert all(map(torch.equal, found, expected))
    assert ebb.stats()["total"]["ops_replayed"] > 0
    assert ebb.stats()["total"]["entered"] == 3
    assert "ebb: calls of checkpoint_wrapper of fairscale 0.4." in capfd.readouterr().err


@pytest.mark.usefixtures("taken_over")
def test_offloading_is_left_to_fairscale(capfd):
    expected = train(lambda block: block)
    ebb.reset_stats()

    found = train(lambda block: checkpoint_wrapper(block, offload_to_cpu=True))

    assert all(map(torch.equal, found, expected))
    assert ebb.stats()["total"]["entered"] == 0
    assert "offload_to_cpu is on" in capfd.readouterr().err


def test_without_ebb_the_function_is_fairscales():
    takeover.install(ebb.policies.recompute_all, "1", ())
    takeover.remove()
    ebb.reset_stats()

    train(checkpoint_wrapper)

    assert ebb.stats()["total"]["entered"] == 0
