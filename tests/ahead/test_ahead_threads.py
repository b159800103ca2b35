"""The worker of replays ahead: its start, its end, its settings, and what it waits for."""

from __future__ import annotations

import contextlib
import gc
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import ebb
from ebb import _testing
from ebb_tests.exactness import resident_kib
from ebb_tests.memory_use import least_growth
from ebb_tests.programs.ahead import (
    WaitInBackward,
    X,
    all_same,
    blocks,
    chain,
    counts,
    counts_ahead,
    in_a_process,
    parameters,
    region,
)
from ebb_tests.programs.paged import Keep
from ebb_tests.replays import delays, replays_ahead
from ebb_tests.stand_ins import kernel


def step(modules, x, entered=region):
    h = x
    for module in modules:
        with entered():
            h = module(h)
    loss = h.square().sum()
    return [loss.detach(), *torch.autograd.grad(loss, [*parameters(modules), x])]


@pytest.mark.sweep
def test_a_thousand_steps_with_random_delays(no_objects_left):
    modules, x = blocks(4, dropout=0.2), torch.randn(X, requires_grad=True)
    draw = random.Random(1)

    def pause(gradient):
        if draw.random() < 0.3:
            time.sleep(draw.random() * 3e-4)

    def once(entered):
        torch.manual_seed(5)
        h = x
        for module in modules:
            with entered():
                h = module(h)
            h.register_hook(pause)
        loss = h.square().sum()
        return [loss.detach(), *torch.autograd.grad(loss, [*parameters(modules), x])]

    expected = once(contextlib.nullcontext)

    def program():
        for number in range(1000):
            with delays(draw.choice([0, 1, 20, 100])):
                ebb.config.ahead.regions = 1 + number % 3
                assert all_same(once(region), expected), number
        gc.collect()

    did = counts_ahead(program)
    assert did["regions_late"] > 20, did
    assert did["regions_in_time"] > 500, did
    assert did["failures"] == 0
    assert ebb.stats()["ahead"]["bytes"] == 0


@pytest.mark.not_sanitized  # what sanitizers remember grows
def test_memory_does_not_grow():
    modules, x = blocks(3), torch.randn(X, requires_grad=True)
    with replays_ahead(2):
        for _ in range(50):
            step(modules, x)
        before = resident_kib()
        for _ in range(400):
            step(modules, x)
        assert resident_kib() - before < 4096
    assert ebb.stats()["ahead"]["workers"] <= 1


def test_worker_ends_when_told_and_starts_again():
    modules, x = blocks(3), torch.randn(X, requires_grad=True)
    expected = step(modules, x, contextlib.nullcontext)

    def program():
        chain(modules, x).sum().backward()

    with replays_ahead():
        for _ in range(5):
            assert all_same(step(modules, x), expected)
            assert counts(program)["regions_in_time"] == 2
            ebb._C.stop_ahead()
            assert ebb.stats()["ahead"]["workers"] == 0


def test_number_of_threads_may_change_and_stays_as_set():
    """A worker with another number of threads would have to set it, and threads begin with that."""
    modules, x = blocks(4), torch.randn(X, requires_grad=True)

    def program():
        chain(modules, x).sum().backward()

    with replays_ahead():
        for threads in (1, 2, 1, 2):
            torch.set_num_threads(threads)
            assert counts(program)["regions_in_time"] + counts(program)["regions_in_time"] >= 3
            with ThreadPoolExecutor(1) as pool:
                assert pool.submit(torch.get_num_threads).result() == threads


def test_warnings_are_not_repeated(capfd):
    """A warning on the worker's thread could not be caught by the program."""
    x = torch.randn(4, 6, requires_grad=True)
    bounds = torch.linspace(-1, 1, 5)

    def program():
        h = x
        for _ in range(3):
            with region():
                h = WaitInBackward.apply(h)
                places = torch.bucketize(h.detach().t(), bounds).t()
                h = (h * places).sin().exp().sin()
        h.sum().backward()

    torch.set_warn_always(True)
    try:
        with replays_ahead(), pytest.warns(UserWarning, match="non-contiguous"):
            did = counts(program)
    finally:
        torch.set_warn_always(False)
    assert did["regions_in_time"] > 0
    assert "non-contiguous" not in capfd.readouterr().err


def test_verify_mode_runs_nothing_ahead():
    modules, x = blocks(3), torch.randn(X, requires_grad=True)
    with replays_ahead(), ebb.verify():
        did = counts(lambda: step(modules, x))
    assert not any(did.values())


@pytest.mark.parametrize("first", [False, True])
def test_denormals_are_flushed_as_in_eager(first):
    """Intra-op threads keep the mode in which they were started, the worker's too."""
    torch.set_num_threads(2)
    x = torch.rand(1 << 18, requires_grad=True)
    small = torch.rand(1 << 18) * 1e-38

    def program(entered):
        with entered():
            h = (small * 0.25 * x).sum()
        with entered():
            out = (h * 2).sin()
        return [torch.autograd.grad(out, x)[0]]

    with replays_ahead():
        if first:
            program(region)
        torch.set_flush_denormal(True)
        try:
            expected = program(contextlib.nullcontext)
            for _ in range(10):
                assert all_same(program(region), expected)
        finally:
            torch.set_flush_denormal(False)


def test_worker_does_not_inherit_flushing_of_denormals():
    """Its intra-op threads start when rows come back, before any recipe runs."""
    done = in_a_process("""
import torch, ebb
from ebb_tests.programs.ahead import *
from ebb_tests.replays import *
from ebb_tests.programs.paged import PRODUCTS
torch.set_num_threads(2)
rows = 1 << 14
x, w = torch.rand(rows, 16), torch.rand(16, 16, requires_grad=True)
factor = torch.rand(rows, 16, requires_grad=True)

def hook(gradient):
    torch.set_flush_denormal(False)
    wait_for_replays()

def program(region, starts):
    with region():
        h = ebb.experimental.mark_rows(x @ w, torch.tensor(rows - 1))
        h = h * 1e-39 * ebb.experimental.mark_rows(factor * 1, torch.tensor(rows - 1))
    h.register_hook(hook)
    with region():
        out = (h * 1e30).exp()
    loss = out[:-1].sum()
    torch.set_flush_denormal(starts)
    return torch.autograd.grad(loss, factor)[0][:-1]

expected = program(contextlib.nullcontext, False)
assert expected.count_nonzero() == expected.numel()
with replays_ahead():
    did = []
    did = counts(lambda: did.append(program(lambda: ebb.region(PRODUCTS), True)) or print(
        torch.equal(did[0], expected)))
print(did["regions_in_time"], ebb.stats()["paging"]["stashed"])
""")
    assert done.stdout.split() == ["True", "1", "1"], done.stderr


def test_records_of_storages_are_freed_with_them():
    with replays_ahead():

        def aliases():
            for _ in range(50_000):
                _ = torch.empty(1).data

        aliases()
        assert least_growth(aliases) < 2000


def test_many_threads_read_and_alias_storages():
    assert _testing.hands_are_known(4, 300_000)


def test_aliases_and_the_running_recipe_are_under_one_lock():
    """Otherwise a thread that runs ahead could wait for itself."""
    assert _testing.hands_without_lock() == []


def test_region_that_a_backward_waits_for_is_not_begun():
    """A thread unpacks a tensor, which takes long. A backward waits for that, and another backward
    comes by the region behind."""
    x = torch.randn(4, requires_grad=True)
    looks = threading.Event()

    def cosine(x):
        if looker is not None and threading.get_ident() == looker.ident:
            looks.set()
            time.sleep(0.5)
        return torch.sin(x + 1.5)

    def program():
        nonlocal looker
        looker = threading.Thread(target=lambda: saved.saved_tensors)
        waiter = threading.Thread(
            target=torch.autograd.grad, args=(h.sum(), x), kwargs={"retain_graph": True}
        )
        looker.start()
        assert looks.wait(10)
        waiter.start()
        time.sleep(0.1)
        torch.autograd.grad(out.sum(), x, retain_graph=True)  # the others still read
        looker.join()
        waiter.join()

    looker = None
    with kernel("cos", cosine), replays_ahead():
        with region():
            h = Keep.apply(x.cos())
            saved, Keep.last = Keep.last, None
        with region():
            out = h.exp().exp()
        did = counts(program)
    assert did["regions_held"] == 1
    assert did["regions_in_time"] == did["regions_late"] == did["regions_stopped"] == 0


def test_backward_does_what_the_worker_has_not_done():
    """The worker gives way between two operators."""
    x = torch.randn(4, requires_grad=True)
    begun = threading.Event()
    here = threading.get_ident()

    def cosine(x):
        if threading.get_ident() != here:
            begun.set()
        return torch.sin(x + 1.5)

    def program():
        with region():
            h = x.cos()
            for _ in range(100):
                h = h + 1
            h = h.sin()
        h.register_hook(lambda gradient: begun.wait(60) and None)
        with region():
            h = h.exp().sin()
        h.sum().backward()

    ebb._C.stop_ahead()  # a worker that has another number of threads would end first
    with kernel("cos", cosine), replays_ahead(), delays(20_000):
        ebb.reset_stats()
        did = counts(program)
    total = ebb.stats()["total"]
    assert begun.is_set()
    assert did["regions_late"] == 1
    assert 0 < total["ops_replayed_ahead"] < total["ops_replayed"]
