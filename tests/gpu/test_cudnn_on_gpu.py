"""Layers whose bits cuDNN's own state decides: recurrent dropout, and the choice of algorithms."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from gpus import (
    MIB,
    NEEDS_GPU,
    OFFLOAD_ALL,
    USES_CUDNN,
    bits_of_eager,
    memory_nearly_full,
    offloading,
    same,
)
from torch import nn
from torch.nn import functional as F

import ebb
from ebb import _testing

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


def saved_of(y):
    """The saved tensor of a function, which another thread asks for; or why there is none."""

    def ask():
        try:
            return y.grad_fn._saved_self.detach()
        except RuntimeError as error:
            return error

    with ThreadPoolExecutor(1) as another:
        return another.submit(ask).result()


@pytest.fixture
def _forgets():
    yield
    _testing.forget_failed_workspaces()


@pytest.mark.parametrize("room", [1024, 256, 64, 36])
@pytest.mark.usefixtures("_forgets")
def test_a_convolution_that_is_replayed_where_memory_is_nearly_full(room, cudnn):
    """It has the forward's bits, or the replay is refused and later results are kept."""
    cudnn.benchmark = False
    torch.manual_seed(1)
    weight = torch.randn(128, 128, 3, 3, device="cuda").div(34).requires_grad_()
    x = torch.randn(16, 128, 64, 64, device="cuda")  # the result has 32 MiB
    expected = F.conv2d(x, weight, padding=1).detach()

    def of_a_region():
        with ebb.region(ebb.policies.recompute_all, "near the peak"):
            return F.conv2d(x, weight, padding=1).sin()

    y = of_a_region()
    with memory_nearly_full(room * MIB):
        found = saved_of(y)
    if isinstance(found, torch.Tensor):
        assert torch.equal(found, expected)
    elif not isinstance(found, torch.OutOfMemoryError):
        assert "convolution" in str(found)
        assert "'near the peak'" in str(found)
        assert "workspace" in str(found)
        again = saved_of(of_a_region())
        assert torch.equal(again, expected)
