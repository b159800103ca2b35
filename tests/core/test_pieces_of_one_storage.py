"""Tensors that share a storage and have version counters of their own: results of unsafe_chunk."""

from __future__ import annotations

import contextlib
import random

import pytest
import torch
import torch.nn.functional as F

import ebb
from ebb_tests.engines import current
from ebb_tests.exactness import each_policy, leaves, like_eager_each, same_bits

pytestmark = pytest.mark.engines("exactness", "device")

IN_PLACE = [
    lambda a, b: a.sigmoid_(),
    lambda a, b: a.tanh_(),
    lambda a, b: a.mul_(b),
    lambda a, b: a.mul_(2),
    lambda a, b: a.add_(b.detach()),
    lambda a, b: a.detach().mul_(3),
    lambda a, b: a.copy_(b),
]
OUT_OF_PLACE = [torch.mul, lambda a, b: a.sin(), lambda a, b: a.exp(), lambda a, b: (a - b).tanh()]


def write_and_read(pieces, results, draw, count):
    for _ in range(count):
        a, b = draw.choice(pieces), draw.choice(pieces)
        if draw.random() < 0.5:
            draw.choice(IN_PLACE)(a, b)
        else:
            results.append(draw.choice(OUT_OF_PLACE)(a, b))


def gradients(seed, region, *, writes_after):
    """Of a random program; the message, if it raises."""
    draw = random.Random(seed)
    x, w = leaves((4, 6), (6, 6))
    with region:
        whole = F.linear(x, w).sin()
        results = [] if draw.random() < 0.7 else [whole * whole]
        pieces = list(torch.unsafe_chunk(whole, 3, dim=1))
        pieces.extend(torch.unsafe_chunk(draw.choice(pieces), 1))
        if draw.random() < 0.3:
            pieces.append(whole.data[:, 1:3])
        results.extend([] if draw.random() < 0.5 else [whole.exp()])
        try:
            write_and_read(pieces, results, draw, draw.randint(2, 6))
        except RuntimeError as error:
            return str(error)
        del whole
    with torch.no_grad():
        for piece in draw.sample(pieces, writes_after):
            piece.add_(1)
    if draw.random() < 0.7:
        del pieces
    loss = torch.stack([result.square().sum() for result in results] or [x.sum()]).sum()
    del results
    try:
        return torch.autograd.grad(loss, (x, w), allow_unused=True)
    except RuntimeError as error:
        return str(error)


def assert_like_eager(seed, policy, *, writes_after=0):
    expected = gradients(seed, contextlib.nullcontext(), writes_after=writes_after)
    found = gradients(seed, ebb.region(policy), writes_after=writes_after)
    if isinstance(expected, str):
        assert isinstance(found, str), f"eager raises: {expected}"
    elif writes_after and isinstance(found, str):
        assert "ebb" in found
    else:
        assert not isinstance(found, str), found
        assert all(map(same_bits, found, expected))
    return not isinstance(expected, str)


@each_policy
@pytest.mark.parametrize(
    "writes_after",
    [
        0,
        pytest.param(
            1, marks=pytest.mark.on_cpu("elsewhere, aliases that no op reads are unseen", run=False)
        ),
    ],
)
def test_writes_to_one_piece_are_seen_by_what_saved_another(policy, writes_after):
    count = 40 if current().is_on_device else 200  # programs on the test device are slow
    valid = sum(assert_like_eager(seed, policy, writes_after=writes_after) for seed in range(count))
    assert valid > count / 4  # eager runs the others too, and raises


@pytest.mark.replays
@pytest.mark.on_cpu("its report counts the bytes of the CPU")
@pytest.mark.parametrize("kind", [torch.nn.GRUCell, torch.nn.LSTMCell])
def test_recurrent_cells_keep_no_storage(kind):
    """They write to the results of unsafe_chunk in place."""
    torch.manual_seed(0)
    cell = kind(32, 32)
    x = torch.randn(16, 32, requires_grad=True)

    def loss():
        h = x
        for _ in range(4):
            h = cell(h, h if kind is torch.nn.GRUCell else (h, h))
            h = h if kind is torch.nn.GRUCell else h[0]
        return h.sum()

    expected = torch.autograd.grad(loss(), x)[0]
    with ebb.record_reports():
        with ebb.region(ebb.policies.recompute_all):
            out = loss()
        found = torch.autograd.grad(out, x)[0]

    assert same_bits(found, expected)
    assert [row.op for row in ebb.report().rows if row.fate in ("escaped", "kept")] == []


@pytest.mark.parametrize(
    "alias",
    [lambda h: h.data, lambda h: torch.unsafe_chunk(h, 1)[0].detach()],
    ids=["data", "unsafe_chunk"],
)
def test_a_write_after_the_region_that_died_with_its_storage_raises(alias):
    """Eager's saved tensor shows the write. The alias was read in the region, so ebb knows it."""
    x = leaves((4,))[0]
    with ebb.region(ebb.policies.recompute_all):
        h = x * 2
        written = alias(h)
        unused = written + 1
        loss = h.sin().sum()
    with torch.no_grad():
        written.add_(1)
    del h, written, unused
    with pytest.raises(RuntimeError, match=r"freed after a write .* Move the write after backward"):
        torch.autograd.grad(loss, x)


@pytest.mark.on_cpu(
    "only there, fingerprints show a write through an alias that ebb never saw", run=False
)
@like_eager_each
def test_an_unseen_write_is_not_read_by_replays(region):
    """The later node unpacks first, from the storage that lives and was written."""
    x = leaves((4,))[0]
    with region:
        h = x * 2
        alias = h.data
        loss = h.exp().sum() + (h * x).sum()
    alias.add_(1)
    return torch.autograd.grad(loss, x)[0]
