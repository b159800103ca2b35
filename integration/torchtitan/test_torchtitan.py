"""torchtitan's activation-checkpointing policies under EBB=1, and ebb's policy `EbbAC`."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("torchtitan.distributed.activation_checkpoint", reason="needs torchtitan")

from ebb_ac import EbbAC
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC

import ebb
from ebb._launch import takeover


class Decoder(torch.nn.Module):
    """A model with torchtitan's module names. torchtitan's own attention does not run on a CPU."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleDict(
            {
                str(i): torch.nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
                for i in range(6)
            }
        )

    def forward(self, x):
        for layer in self.layers.values():
            x = layer(x)
        return x


def gradients(config=None):
    torch.manual_seed(0)
    model = Decoder()
    if config is not None:
        config.build().apply(model)
    for _ in range(2):  # a selective policy decides in the first forward
        ebb.reset_stats()
        model.zero_grad()
        torch.manual_seed(1)
        model(torch.randn(2, 16, 64)).square().mean().backward()
    return [p.grad for p in model.parameters()]


@pytest.fixture(scope="module")
def expected():
    return gradients()


@pytest.mark.parametrize("policy", ["torchtitan", "recompute_all", "mm:save,default:recompute"])
def test_our_policy(expected, policy):
    found = gradients(EbbAC.Config(policy=policy))
    assert all(map(torch.equal, found, expected))
    stats = ebb.stats()
    assert set(stats["regions"]) == {f"layers.{i}" for i in range(6)}
    assert stats["total"]["bytes_dropped"] > 0


def test_theirs_under_EBB(expected):
    replayed = {}
    takeover.install(ebb.policies.recompute_all, "1", ())
    try:
        for config in (FullAC.Config(), SelectiveAC.Config()):
            assert all(map(torch.equal, gradients(config), expected))
            total = ebb.stats()["total"]
            assert total["entered"] == 6
            replayed[type(config)] = total["ops_replayed"]
    finally:
        takeover.remove()
    assert 0 < replayed[SelectiveAC.Config] < replayed[FullAC.Config]
