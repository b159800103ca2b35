"""State that a forward reads and writes: buffers, tables, caches, counters, branches, autocast."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ebb
from ebb_tests.exactness import like_eager, policies, same_bits

pytestmark = pytest.mark.engines("device")


def train(make, policy, steps=3, batches=1):
    """Losses, gradients, parameters and buffers of a few optimiser steps; policy None is eager."""
    torch.manual_seed(0)
    net = make()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    x = torch.randn(4, 8)
    seen = []
    for step in range(steps):
        losses = []
        for batch in range(batches):
            with ebb.region(policy) if policy is not None else contextlib.nullcontext():
                losses.append(net(x + step + batch).float().square().mean())
        sum(losses).backward()
        seen += [loss.detach().clone() for loss in losses]
        seen += [p.grad.clone() for p in net.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    return seen + list(net.state_dict().values()) + [torch.rand(1)]


def assert_trains_exactly(make, **options):
    expected = train(make, None, **options)
    for name, policy in policies().items():
        actual = train(make, policy, **options)
        assert len(actual) == len(expected)
        for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
            assert same_bits(a, e), f"policy {name}: result {i}"


class Module(nn.Module):
    """A linear layer, a buffer, and a forward given as a function of them."""

    def __init__(self, forward):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("state", torch.zeros(8))
        self.calls = 0
        self.run = forward

    def forward(self, x):
        return self.run(self, x)


def written_then_read(m, x):
    with torch.no_grad():
        m.state.copy_(x.mean(0))
    return (m.linear(x) * m.state.exp()).sin() * x


def read_then_written(m, x):
    h = (m.linear(x) + m.state).sin()
    with torch.no_grad():
        m.state.lerp_(h.detach().mean(0), 0.1)
    return h * h


def accumulated_twice(m, x):
    m.state += x.detach().sum(0)
    h = (m.linear(x) * m.state.sin()).tanh()
    m.state += h.detach().sum(0)
    return (h + m.state).sin() * h


def replaced(m, x):
    m.state = (0.9 * m.state + x.detach().mean(0)).detach()
    return F.gelu(m.linear(x) * m.state) * m.state


def quantised_by_observed_range(m, x):
    h = m.linear(x)
    m.state[0] = torch.maximum(m.state[0], h.detach().abs().max())
    scale = m.state[0] / 127
    return h + ((h / scale).round() * scale - h).detach() * h.sin()


def normalised_by_counted_statistics(m, x):
    m.state[1] += 1
    m.state[2:4].mul_(1 - 1 / m.state[1]).add_(x.detach().mean() / m.state[1])
    return ((m.linear(x) - m.state[2]) * m.state[3].exp()).sigmoid()


@pytest.mark.parametrize(
    "forward",
    [
        written_then_read,
        read_then_written,
        accumulated_twice,
        replaced,
        quantised_by_observed_range,
        normalised_by_counted_statistics,
    ],
)
@pytest.mark.parametrize("batches", [1, 2])
def test_buffers(forward, batches):
    assert_trains_exactly(lambda: Module(forward), batches=batches)


def test_table_built_at_the_first_forward_inside_a_region():
    def rotary(m, x):
        if not hasattr(m, "table"):
            m.table = torch.outer(torch.arange(4.0), 10000.0 ** -(torch.arange(8.0) / 8)).cos()
        return (m.linear(x) * m.table).sin() * x

    assert_trains_exactly(lambda: Module(rotary))


def test_table_that_grows_with_the_sequence():
    def grow(m, x):
        m.calls += 1
        if not hasattr(m, "table") or m.table.shape[0] < m.calls:
            m.table = torch.arange(float(m.calls)).exp().sin()[:, None]
        return (m.linear(x) * m.table[m.calls - 1]).sin()

    assert_trains_exactly(lambda: Module(grow), steps=4, batches=2)


def test_python_counters_count_once():
    def count(m, x):
        m.calls += 1
        return (m.linear(x) * m.calls).sin()

    for policy in policies().values():
        net = Module(count)
        with ebb.region(policy):
            loss = net(torch.ones(2, 8)).sum()
        loss.backward()
        assert net.calls == 1
    assert_trains_exactly(lambda: Module(count))


def test_branches_on_values():
    def branch(m, x):
        h = m.linear(x)
        if h.sum().item() > 0:
            h = h.sin()
        while bool((h.abs().max() > 1).item()):
            h = h / 2
        rows = (h[:, 0] > 0).nonzero()[:, 0]
        return h.index_select(0, rows).exp().sum() + h.sum() * float(h.detach().max())

    assert_trains_exactly(lambda: Module(branch))


def test_key_value_cache_as_a_preallocated_buffer():
    def attend(m, x):
        if not hasattr(m, "keys"):
            m.keys, m.length = torch.zeros(32, 8), 0
        h = m.linear(x)
        m.keys[m.length : m.length + 4] = h.detach()
        m.length += 4
        return F.softmax(h @ m.keys[: m.length].t(), -1) @ m.keys[: m.length]

    assert_trains_exactly(lambda: Module(attend))


def test_key_value_cache_by_concatenation_with_gradients_through_it():
    def attend(m, x):
        h = m.linear(x)
        past = None
        for token in h.unbind(0):
            past = token[None] if past is None else torch.cat((past, token[None]))
            token = F.softmax(past @ token, 0) @ past
        return past.sin() * token

    assert_trains_exactly(lambda: Module(attend))


def test_batch_norm_in_training_and_evaluation():
    def both(m, x):
        if not hasattr(m, "norm"):
            m.norm = nn.BatchNorm1d(8)
        first = m.norm.train()(m.linear(x)).relu_()
        return first * m.norm.eval()(m.linear(x)).sigmoid()

    assert_trains_exactly(lambda: Module(both))


@like_eager()
def test_autocast_weight_cache_within_and_across_regions(region):
    net, x = Module(lambda m, x: m.linear(m.linear(x).sin())), torch.randn(4, 8)
    with torch.autocast("cpu", torch.bfloat16):
        outside = net(x)  # the cast weight is in the cache before the first region
        total = outside.float().sum()
        for _ in range(2):
            with region:
                total = total + net(x).float().exp().sum()
    total.backward()
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        last = net(x)
    return [last, *(p.grad for p in net.parameters())]


def test_autocast_inside_the_region_cache_first_filled_there():
    def cast(m, x):
        with torch.autocast("cpu", torch.bfloat16):
            with torch.no_grad():
                warm = m.linear(x)
            h = m.linear(x) + warm
            with torch.autocast("cpu", enabled=False):
                h = h + m.linear(x)
        return F.layer_norm(h.float(), (8,)).exp()

    assert_trains_exactly(lambda: Module(cast), batches=2)


@like_eager()
def test_parameters_tied_between_regions_of_their_own(region):
    embedding = nn.Embedding(8, 8)
    head = nn.Linear(8, 8, bias=False)
    head.weight = embedding.weight
    with region:
        h = F.gelu(embedding(torch.arange(4))) @ embedding.weight.t().tanh()
    with region:
        loss = head(h.sin()).exp().mean()
    loss.backward()
    return embedding.weight.grad


@like_eager()
def test_optimizer_step_in_backward(region):
    net = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(3)])

    def step(p):
        with torch.no_grad():
            p.add_(p.grad, alpha=-0.1)
        p.grad = None

    for p in net.parameters():
        p.register_post_accumulate_grad_hook(step)
    x = torch.randn(4, 8)
    for _ in range(3):
        h = x
        for block in net:
            with region:
                h = block(h)
        h.square().mean().backward()
    return list(net.parameters())
