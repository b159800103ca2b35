"""Layers whose bits cuDNN's own state decides: recurrent dropout, and the choice of algorithms."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import ebb
from ebb_tests.gpus import (
    MIB,
    NEEDS_GPU,
    OFFLOAD_ALL,
    USES_CUDNN,
    bits_of_eager,
    memory_nearly_full,
    offloading,
    same,
)

pytestmark = [*NEEDS_GPU, USES_CUDNN]

RUNS = 20
POLICIES = {"recompute_all": ebb.policies.recompute_all, "offload_all": OFFLOAD_ALL}
policies = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)


@pytest.fixture
def cudnn():
    """Its settings, which the test may change."""
    names = ("benchmark", "deterministic", "enabled")
    before = {name: getattr(torch.backends.cudnn, name) for name in names}
    yield torch.backends.cudnn
    for name, value in before.items():
        setattr(torch.backends.cudnn, name, value)


def gradients(net, loss):
    return torch.autograd.grad(loss, list(net.parameters()))


@policies
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_layers_with_dropout(kind, policy):
    """Two calls each draw masks of their own, which no replay may change."""
    net = kind(24, 24, num_layers=3, dropout=0.5).to("cuda")
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(7, 4, 24, generator=generator).to("cuda")

    def run(make_region):
        torch.manual_seed(2)
        found = []
        for _ in range(RUNS):
            with make_region():
                first, _ = net((x * 2).sin())
                second, _ = net(first.exp().cos())
                loss = (second * first).square().sum()
            found += [loss.detach(), *gradients(net, loss)]
        return found

    expected = bits_of_eager(lambda: run(torch.enable_grad))
    with offloading():
        found = run(lambda: ebb.region(policy))

    assert not torch.equal(expected[0], expected[1 + len(list(net.parameters()))])
    assert same(found, expected)


@policies
@pytest.mark.parametrize("deterministic", [False, True])
def test_convolutions_whose_algorithm_is_chosen_by_timing(policy, deterministic, cudnn):
    """Backward's thread times the algorithms for itself, and may choose others than forward's."""
    cudnn.benchmark, cudnn.deterministic = True, deterministic
    plain = nn.Sequential(
        nn.Conv2d(3, 16, 5, padding=2),
        nn.GELU(),
        nn.Conv2d(16, 16, 3, stride=2),
        nn.BatchNorm2d(16),
        nn.GELU(),
        nn.ConvTranspose2d(16, 8, 3),
        nn.Tanh(),
        nn.Conv2d(8, 8, 3, groups=4),
    ).to("cuda")
    ours = copy.deepcopy(plain)
    ebb.apply(ours, policy, modules="")
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(8, 3, 41, 37, generator=generator).to("cuda")

    def run(net):
        found = []
        for _ in range(RUNS):
            loss = net(x).square().sum()
            found += [loss.detach(), *gradients(net, loss)]
        return found

    expected = bits_of_eager(lambda: run(plain))
    with offloading():
        assert same(run(ours), expected)
    statistics = zip(ours.buffers(), plain.buffers(), strict=True)
    assert all(b.isfinite().all() and e.isfinite().all() for b, e in statistics)


@pytest.mark.parametrize("room", [32, 128, 512])
def test_saved_convolutions_where_memory_is_nearly_full_in_backward(room, record_property):
    """With less memory torch takes an algorithm that needs less. The figures show whether
    recomputed convolutions then have other bits: see docs/limits.md."""
    net = nn.Sequential(
        *(layer for _ in range(3) for layer in (nn.Conv2d(64, 64, 3, padding=1), nn.GELU()))
    ).to("cuda")
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(16, 64, 56, 56, generator=generator).to("cuda")

    def run(region):
        with region:
            h = net(x)
        loss = h.square().sum()
        with memory_nearly_full(room * MIB):
            return [loss.detach(), *gradients(net, loss)]

    try:
        expected = bits_of_eager(lambda: run(torch.enable_grad()))
        saved = run(ebb.region(ebb.Policy({"aten::convolution": ebb.SAVE})))
        recomputed = run(ebb.region(ebb.policies.recompute_all))
    except torch.OutOfMemoryError:
        pytest.skip("does not fit")

    record_property("recomputed differ", not same(recomputed, expected))
    assert same(saved, expected)
