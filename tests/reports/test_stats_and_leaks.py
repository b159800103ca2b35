"""Counters of steps, and memory that steps must free."""

from __future__ import annotations

import gc
from functools import partial

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.functional import gelu
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import ebb
from ebb_tests.exactness import POLICIES, assert_exact, resident_kib
from ebb_tests.memory_use import allocations, peak_bytes
from ebb_tests.other_threads import in_thread, run_in_threads


def test_counts_of_a_step():
    x = torch.randn(8, 8, requires_grad=True)
    for _ in range(3):
        with ebb.region(ebb.policies.save_matmuls, "block"):
            loss = (x @ x).exp().sin().sum()
        loss.backward()

    stats = ebb.stats()
    assert stats["passes"] == 2
    block = stats["regions"]["block"]
    assert block == stats["total"]
    assert block["entered"] == 1
    assert block["ops_seen"] == 4
    assert block["ops_recorded"] == 4
    assert block["ops_replayed"] == 1  # exp: its result is saved by exp and by sin
    assert block["bytes_dropped"] == 8 * 8 * 4
    assert block["bytes_saved"] == 8 * 8 * 4  # the product, for the replay of exp
    assert block["bytes_packed"] == 0  # autograd does not save it


NOTHING_SAVED = ("recompute_all", "recompute_collectives")
PRESETS = [n for n in dir(ebb.policies) if isinstance(getattr(ebb.policies, n), ebb.Policy)]


@pytest.mark.parametrize("modules", [None, ""], ids=["blocks", "the model"])
@pytest.mark.parametrize("preset", PRESETS)
def test_saved_bytes_are_those_of_the_report(preset, modules):
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    model, x = torch.nn.TransformerEncoder(layer, 4), torch.randn(2, 16, 32)

    with ebb.record_reports(), ebb.apply(model, getattr(ebb.policies, preset), modules):
        model(x).square().mean().backward()

    assert ebb.stats()["total"]["bytes_saved"] == ebb.report().totals["saved"]
    assert (ebb.report().totals["saved"] > 0) == (preset not in (*NOTHING_SAVED, "offload_inputs"))


def test_micro_batches_before_one_backward_are_one_step():
    x = torch.randn(4, requires_grad=True)
    losses = []
    for _ in range(3):
        with ebb.region(name="micro"):
            losses.append((x * 2).exp().sum())
    sum(losses).backward()

    assert ebb.stats()["total"]["entered"] == 3


def test_reset_of_counters():
    with ebb.region():
        torch.ones(3) * 2
    ebb.reset_stats()

    stats = ebb.stats()
    assert stats["regions"] == {}
    assert stats["passes"] == 0
    assert set(stats["total"].values()) == {0}


@pytest.mark.sweep
@pytest.mark.parametrize("policy", ["recompute_all", "save_matmuls", "torchtitan", "save_all"])
def test_thousand_steps_leave_no_memory(policy):
    net = nn.Sequential(
        nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.Dropout(), nn.Linear(8, 8)
    )
    ebb.apply(net, getattr(ebb.policies, policy), modules="")
    x = torch.randn(4, 8)

    def steps(count):
        for _ in range(count):
            net(x).square().sum().backward()
            net(x)  # its backward never runs
        gc.collect()
        stats = ebb.stats()
        tensors = sum(isinstance(o, torch.Tensor) for o in gc.get_objects())
        return stats["live_recipes"], stats["live_handles"], stats["open_regions"], tensors

    gc.collect()
    baseline = tuple(ebb.stats()[k] for k in ("live_recipes", "live_handles", "open_regions"))
    first = steps(100)
    before = resident_kib()
    assert steps(1000) == first
    grown = resident_kib() - before
    assert first[:3] <= baseline
    assert grown < 4096, f"the process grew by {grown} KiB in 1,000 steps"


@pytest.mark.usefixtures("no_objects_left")
def test_bytes_are_freed_when_the_model_frees_them():
    x = torch.randn(1000, requires_grad=True)
    with ebb.region():
        h = x.exp()
        storage = StorageWeakRef(h.untyped_storage())
        h = h.sin()
        assert storage.expired()
        loss = h.sum()
    loss.backward()


def test_numbers_are_not_saved():
    """`x + 1e-6` is recorded as an operator on two tensors."""
    x = torch.randn(4, 8, requires_grad=True)
    outputs = []

    def forward():
        with ebb.region():
            y = x
            for _ in range(50):
                y = (y + 1e-6).tanh()
        outputs.append(y)

    assert sum(allocations(forward)) == x.nbytes  # those of the result
    outputs[0].sum().backward()


def test_long_region_between_short_ones(no_objects_left):
    """The recorder reuses its memory from region to region."""
    x = torch.randn(3, requires_grad=True)
    for ops in (2, 5000, 3, 700, 1):

        def program(x, ops=ops):
            y = x
            for i in range(ops):
                y = y.sin() if i % 3 else y * 1.01
            return y.sum()

        assert_exact(program, [x])


def test_objects_are_freed_after_their_thread_ended(no_objects_left):
    x = torch.randn(4, 4, requires_grad=True)
    losses = []

    def forward():
        with ebb.region():
            y = x
            for _ in range(40):
                y = (y @ y).tanh()
        losses.append(y.sum())

    for _ in range(20):
        in_thread(forward)
    assert ebb.stats()["live_recipes"] > 0
    for loss in losses[::2]:
        loss.backward()


def test_handle_keeps_only_its_own_recipe():
    gc.collect()
    before = ebb.stats()
    x = torch.randn(8, requires_grad=True)
    with ebb.region():
        kept = x.exp()
        y = x
        for _ in range(100):
            y = y.sin()
    del y

    after = ebb.stats()
    for count in ("live_recipes", "live_handles"):
        assert after[count] - before[count] == 1  # to recompute `kept`
    kept.sum().backward()


def test_without_gradients_values_are_freed_after_their_readers():
    w = torch.randn(1024, 1024)

    def chain():
        with torch.no_grad(), ebb.region(ebb.policies.save_all):
            h = w
            for _ in range(20):  # 12 MiB each
                h = (h @ w).tanh() * 2

    assert peak_bytes(chain) < 64 << 20


def test_peak_is_at_most_that_of_checkpoint():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 128), nn.Linear(128, 32)

        def forward(self, x):
            return x + self.down(gelu(self.up(self.norm(x))))

    def peak(run):
        x = torch.randn(2, 8, 32, requires_grad=True)
        blocks = [Block(), Block()]

        def loss():
            h = x
            for one in blocks:
                h = run(one, h)
            return h.square().mean()

        def step():
            loss().backward()

        step()  # the gradients exist from here on
        return peak_bytes(step)

    def in_region(block, x):
        with ebb.region():
            return block(x)

    plain = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
    assert peak(in_region) <= peak(plain)


class WatchStorages(TorchDispatchMode):
    """Remembers, weakly, the storage of every tensor that an op returns."""

    def __init__(self):
        super().__init__()
        self.storages = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = func(*args, **(kwargs or {}))
        for result in tree_leaves(results):
            if isinstance(result, torch.Tensor):
                self.storages.append(StorageWeakRef(result.untyped_storage()))
        return results


@pytest.mark.usefixtures("no_objects_left")
@pytest.mark.parametrize("policy", POLICIES)
def test_no_storage_outlives_its_step(policy):
    net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(True), nn.Dropout(), nn.GELU())
    x = torch.randn(4, 8)

    def step():
        with ebb.region(POLICIES[policy]):
            out = net(x)
            out[:2].mul_(2)
            loss = out.sin().sum()
        return torch.autograd.grad(loss, list(net.parameters()))

    with WatchStorages() as watch:
        for _ in range(5):
            step()
    gc.collect()

    assert len(watch.storages) > 100
    left = sum(not storage.expired() for storage in watch.storages)
    inputs = {storage.cdata for storage in watch.storages if not storage.expired()}
    inputs -= {StorageWeakRef(t.untyped_storage()).cdata for t in (x, *net.state_dict().values())}
    assert not inputs, f"{left} storages are alive"


@pytest.mark.sweep
@pytest.mark.usefixtures("no_objects_left")
def test_threads_train_models_with_shared_parameters():
    shared = torch.randn(8, 8, requires_grad=True)
    steps, policies, failures = 1000, list(POLICIES.values()), []

    def gradients(own, x, region):
        with region:
            h = own(x) @ shared
            h = h.relu_() * torch.nn.functional.layer_norm(h, (8,)).exp()
            loss = torch.cat(h.split(4, 1)).sin().sum()
        return torch.autograd.grad(loss, (shared, *own.parameters()))

    def train(index):
        own = nn.Sequential(nn.Linear(8, 8), nn.GELU())
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(4, 8, generator=generator)
        expected = gradients(own, x, torch.enable_grad())
        for step in range(steps):
            region = ebb.region(policies[step % len(policies)])
            actual = gradients(own, x, region)
            if not all(torch.equal(a, e) for a, e in zip(actual, expected, strict=True)):
                failures.append((index, step))

    run_in_threads(*(partial(train, index) for index in range(8)))

    assert not failures
