"""What looking for dead values costs, and what it finds: see Note [When dead values are looked
for]."""

from __future__ import annotations

from collections import deque

import pytest
import torch

import ebb
from ebb import _testing
from ebb_tests.memory_use import peak_bytes
from ebb_tests.programs.offloaded import finish_copies
from ebb_tests.stand_ins import fake_accelerator

LARGE = 17 << 20  # bytes; more than the 16 MiB after which values are looked at


def parameters(count):
    return [torch.zeros(1) for _ in range(count)]


def looked_at_per_op(known, ops=64):
    """By ops that each read a large leaf, in a region that knows so many values that live."""
    large = torch.zeros(1, dtype=torch.uint8).expand(4)
    leaves = [torch.empty(LARGE, dtype=torch.uint8)[:4] for _ in range(ops)]
    with torch.no_grad(), ebb.region():
        held = [parameter + 1 for parameter in parameters(known)]
        held.append(leaves[0] + large)  # the first time all are looked at
        before = _testing.values_looked_at()
        for leaf in leaves[1:]:
            held.append(leaf + large)
        return (_testing.values_looked_at() - before) / ops


def test_large_leaves_cost_the_same_however_much_the_region_holds():
    few, many = looked_at_per_op(100), looked_at_per_op(10_000)

    assert many < 100
    assert many < 2 * few, (few, many)


@pytest.mark.parametrize("life", [1, 4, 16])
@pytest.mark.parametrize("known", [10, 2_000])
def test_what_has_died_is_found_soon(known, life):
    """Each op keeps what it reads, and each result is dropped after some ops. Beside those that
    live there are one being made, two being read, and at most half as many as live."""
    held, living = [], deque([torch.zeros(LARGE, dtype=torch.uint8)], maxlen=life)

    def chain():
        for _ in range(60):
            living.append(living[-1] + 1)

    with torch.no_grad(), ebb.region(ebb.policies.save_all):
        held.extend(parameter + 1 for parameter in parameters(known))
        most = peak_bytes(chain) / LARGE
        living.clear()

    assert most <= life + 3 + life / 2 + 0.1


def test_many_writes_to_one_tensor_are_looked_at_seldom():
    x = torch.zeros(4)
    with torch.no_grad(), ebb.region():
        h = x + 1
        before = _testing.values_looked_at()
        for _ in range(5_000):
            h.add_(1)
        looked_at = _testing.values_looked_at() - before

    assert looked_at <= 3 * 5_000


def test_what_only_a_living_recipe_reads_waits_until_somebody_needs_it():
    """The results may be dropped yet; then nothing would have needed what they were made of."""
    policy = ebb.Policy({"aten::neg": ebb.OFFLOAD})
    with fake_accelerator() as fake:
        x = torch.zeros(LARGE // 4, requires_grad=True)
        with ebb.region(policy):
            results = []
            for _ in range(4):
                results.append(-x + 1)  # neither saves anything
            assert fake.counts()["queued"] == 0
            y = results[0].exp()
            results.clear()
            for _ in range(4):
                results.append(-x + 1)
            sent = fake.counts()["queued"]
        finish_copies(fake)

        assert sent <= 1
        assert fake.counts()["copies_out"] <= 1
        y.sum().backward()


def test_what_a_handle_needs_is_sent_before_the_region_ends():
    policy = ebb.Policy({"aten::neg": ebb.OFFLOAD})
    with fake_accelerator() as fake:
        x = torch.zeros(LARGE // 4, requires_grad=True)
        with ebb.region(policy):
            y = (-x + 1).exp().sin()  # sin saves what exp gave; that is made of what neg gave
            for _ in range(8):
                y = y + torch.zeros(LARGE // 4)
            sent = fake.counts()["queued"]
        finish_copies(fake)
        y.sum().backward()

    assert sent == 1
