"""Allocations that fail: Note [Memory given back]"""

from __future__ import annotations

import contextlib
import gc
import weakref
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import ebb
from ebb import _C, _testing
from ebb_tests.exactness import same_bits
from ebb_tests.other_threads import run_in_threads
from ebb_tests.programs.ahead import room

WIDTH, BLOCKS = 16, 4
FAULT = "fault injected"
ANYTHING = 1 << 40  # more bytes than any region keeps
# Bytes: numbers, of which operators that write make tensors, have fewer, and the states of
# generators more.
LEAST, MOST = 200, 4096


@contextlib.contextmanager
def faults(every, seed=0, least=LEAST, most=MOST, is_anywhere=False):
    """Inside, one of so many allocations fails: of ebb's kernels, or all."""
    _testing.fail_allocations(every, seed, least, most, is_anywhere)
    try:
        yield
    finally:
        _testing.fail_allocations(0)


class Block(nn.Module):
    """Writes in place, draws, and keeps statistics."""

    def __init__(self, dropout=0.3):
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.norm = nn.BatchNorm1d(2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = dropout

    def forward(self, x):
        h = F.gelu(self.norm(self.up(x)))
        h = F.relu(torch.cat([h.sin(), h.cos()], 1)[:, ::2].contiguous(), inplace=True)
        h = F.dropout(self.down(h), self.dropout)
        return x + h.index_select(0, torch.arange(len(x)).flip(0)).mul_(0.5)


class Net(nn.Module):
    def __init__(self, **settings):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(**settings) for _ in range(BLOCKS))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x

    def forget_statistics(self):
        for module in self.modules():
            if isinstance(module, nn.BatchNorm1d):
                module.reset_running_stats()


def inputs():
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(3))


def no_region(name):
    return contextlib.nullcontext()


def step(net, x, in_regions=True, seed=1):
    """What a step leaves: gradients, statistics, and where the generator is."""
    net.zero_grad()
    if seed is not None:
        torch.manual_seed(seed)
    region = partial(ebb.region, ebb.policies.recompute_all) if in_regions else no_region
    h = x
    for number, block in enumerate(net.blocks):
        with region(f"block {number}"):
            h = block(h)
    h.square().sum().backward()
    gradients = [p.grad.clone() for p in net.parameters()]
    state = [] if seed is None else [torch.get_rng_state()]
    return [*gradients, *(b.clone() for b in net.buffers()), *state]


def step_unless_it_fails(net, seed=1):
    try:
        return step(net, inputs(), seed=seed)
    except RuntimeError as error:
        if FAULT not in str(error):
            raise
        return None


def risen(before):
    after = _C.room_stats()
    return {name: after[name] - before[name] for name in after}


def live():
    stats = ebb.stats()
    return {name: stats[name] for name in ("live_recipes", "live_handles", "open_regions")}


@pytest.fixture
def assert_none_left():
    """Of this test; others may have ended with an exception that holds a graph."""
    gc.collect()
    before = live()

    def check():
        assert live() == before

    return check


@pytest.mark.parametrize(("is_anywhere", "every"), [(False, 60), (True, 150)])
def test_regions_give_memory_back_when_an_allocation_fails(is_anywhere, every, assert_none_left):
    """An allocation of a region's kernel fails, or any other one, also in backward. The step after
    a failed one is exact too."""
    expected = step(Net(), inputs(), in_regions=False)
    came_through, before = 0, _C.room_stats()

    for seed in range(200):
        net = Net()
        with room(used=1000), faults(every, seed, is_anywhere=is_anywhere):
            found = step_unless_it_fails(net)  # it fails if no region keeps anything
        if found is None:
            net.forget_statistics()
            with room(used=1000):
                found = step(net, inputs())
        else:
            came_through += 1
        assert all(map(same_bits, found, expected)), seed

    counts = risen(before)
    assert 50 < came_through < 195
    assert counts["shortages"] > 50
    assert counts["regions_given_up"] > counts["shortages"]
    assert_none_left()


def test_all_regions_give_memory_back_and_the_limit_falls():
    x = torch.randn(64, 64, requires_grad=True)
    used = 15 * x.nbytes
    seen = set()
    for seed in range(12):
        with room(used=used):
            kept = []
            for _ in range(4):
                with ebb.region(ebb.policies.recompute_all):
                    kept.append(x.sin().exp().mul(2))
            before = _C.room_stats()
            with (
                contextlib.suppress(RuntimeError),  # it fails again, and nothing is left to give
                ebb.region(ebb.policies.recompute_all),
                faults(3, seed, most=ANYTHING),
            ):
                kept.append(x.tanh())
            counts, limit = risen(before), _C.room_limit()
        again = ebb.stats()["total"]["ops_replayed"]
        sum(y.sum() for y in kept).backward()

        failed = counts["shortages"]
        assert failed in (0, 1)
        assert limit == (used - used // 10 if failed else ANYTHING)
        assert counts["regions_given_up"] == 4 * failed
        assert ebb.stats()["total"]["ops_replayed"] == again + 8 * failed
        seen.add(failed)
    assert seen == {0, 1}


def test_an_open_region_gives_up_what_it_keeps_itself():
    def program(x):
        return x.sin().exp().tanh().mul(2).sum()

    x = torch.randn(64, 64, requires_grad=True)
    expected = torch.autograd.grad(program(x), x)
    before = _C.room_stats()
    for seed in range(20):
        with room(used=1000), contextlib.suppress(RuntimeError):
            with ebb.region(ebb.policies.recompute_all), faults(4, seed, most=ANYTHING):
                loss = program(x)
            assert all(map(same_bits, torch.autograd.grad(loss, x), expected))
    assert risen(before)["shortages"] > 0


def test_given_back_value_that_the_program_holds_still_escapes():
    x = torch.randn(64, 64, requires_grad=True)

    def escaped(inside=contextlib.nullcontext):
        """Bytes that escape, and how many regions gave memory back."""
        before, given = ebb.stats()["total"]["bytes_escaped"], _C.room_stats()
        with room(used=1000), contextlib.suppress(RuntimeError):
            with ebb.region(ebb.policies.recompute_all):
                h = x.sin()
                y = h.cos().exp().mul(2)
                with inside():
                    y = y.tanh()
            after = ebb.stats()["total"]["bytes_escaped"]
            del h, y
            return after - before, risen(given)["regions_given_up"]

    expected = escaped()
    assert expected == (x.nbytes, 0)
    found = [escaped(partial(faults, 2, seed, most=ANYTHING)) for seed in range(20)]
    assert {*filter(None, found)} == {expected, (x.nbytes, 1)}


def test_storage_with_a_python_object_is_not_given_back():
    """To free the object needs the GIL, which the thread that allocates must not wait for."""
    x = torch.randn(64, 64, requires_grad=True)
    with room(used=1000):
        with ebb.region(ebb.policies.recompute_all):
            h = x.sin()
            storage = StorageWeakRef(h.untyped_storage())
            loss = h.cos().exp().sum()
        del h
        before = _C.room_stats()
        with faults(1, most=ANYTHING, is_anywhere=True), pytest.raises(RuntimeError, match=FAULT):
            x.exp()
        assert risen(before)["bytes_given_up"] == x.nbytes  # of two
        assert not storage.expired()
        found = torch.autograd.grad(loss, x)[0]

    assert same_bits(found, torch.autograd.grad(x.sin().cos().exp().sum(), x)[0])


@pytest.mark.parametrize("is_anywhere", [False, True])
def test_threads_with_regions_give_each_other_memory(is_anywhere, assert_none_left):
    nets = [Net(dropout=0.0) for _ in range(4)]
    expected = step(Net(dropout=0.0), inputs(), in_regions=False, seed=None)
    done = []

    def work(net):
        for _ in range(25):
            net.forget_statistics()
            found = step_unless_it_fails(net, seed=None)
            if found is not None:
                done.append(found)

    with room(used=1000), faults(80, is_anywhere=is_anywhere):
        run_in_threads(*(partial(work, net) for net in nets))

    assert all(all(map(same_bits, found, expected)) for found in done)
    assert len(done) > 25
    assert_none_left()


@pytest.mark.parametrize("mode", ["room", "replays ahead"])
def test_graph_that_gave_memory_back_dies_with_its_results(mode):
    """The next region drops the last reference, not the thread that allocates."""

    class Packed:
        def __init__(self, tensor):
            self.tensor = tensor.clone()

    packed = []

    def pack(tensor):
        one = Packed(tensor)
        packed.append(weakref.ref(one))
        return one

    x = torch.randn(64, 64, requires_grad=True)
    before = _C.room_stats()
    ebb.config.ahead.regions = 1 if mode == "replays ahead" else 0
    with room(used=1000) if mode == "room" else contextlib.nullcontext():
        for _ in range(5):
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda one: one.tensor):
                y = ebb.checkpoint(lambda a: a.sin().exp().cos(), x * 2)
            with faults(1, most=ANYTHING, is_anywhere=True), contextlib.suppress(RuntimeError):
                torch.empty(1000)
            del y
        with ebb.region(ebb.policies.recompute_all):
            x.sin()
    gc.collect()

    assert risen(before)["shortages"] == 5
    assert len(packed) > 4
    assert [one for one in packed if one() is not None] == []


def test_list_of_graphs_with_room_does_not_grow_behind_an_old_graph():
    x = torch.randn(4, requires_grad=True)
    with room(used=1000):
        with ebb.region(ebb.policies.recompute_all):
            waits = x.sin().exp()
        for _ in range(500):
            with ebb.region(ebb.policies.recompute_all):
                y = x.cos().exp()
            y.sum().backward()
        assert _testing.graphs_with_room() <= 130
    waits.sum().backward()
