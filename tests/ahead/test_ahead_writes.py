"""Programs that write, beside a replay, to what it reads: the bits of eager, or an error."""

from __future__ import annotations

import contextlib
import random
import threading
import time

import pytest
import torch

import ebb
from ebb_tests.exactness import same_bits
from ebb_tests.programs.ahead import counts_ahead, region, two_regions
from ebb_tests.replays import delays, replays_ahead, wait_for_replays
from ebb_tests.stand_ins import kernel

SIZE = 1 << 20
ROUNDS = 40


def assert_outcomes_are_exact(program, *, may_raise=False):
    """Runs the program many times; its hook comes at another moment each time. Each time the bits
    must be eager's, or, with `may_raise`, there is an error about the write."""
    draw = random.Random(2)
    expected = program(contextlib.nullcontext, 0)

    def run():
        for _ in range(ROUNDS):
            try:
                assert same_bits(program(region, draw.random() * 0.004), expected)
            except RuntimeError as error:
                assert may_raise
                assert "modified by an inplace operation" in str(error)  # noqa: PT017

    did = counts_ahead(run)
    began = ("regions_in_time", "regions_late", "regions_stopped", "regions_in_vain")
    assert sum(did[what] for what in began) > ROUNDS // 4, did


def test_to_a_value_that_can_be_made_again():
    """Versions move when the write's kernel has returned, too late for the replay beside it."""
    x = torch.rand(SIZE, requires_grad=True)

    def program(entered, pause):
        kept = []

        def body(x):
            kept.append(x * 1.5)
            return kept[0].exp().mean()

        def hook(gradient):
            time.sleep(pause)
            with torch.no_grad():
                kept[0].add_(1)

        return two_regions(x, body, hook, entered)

    assert_outcomes_are_exact(program)


@pytest.mark.parametrize("through", ["itself", "an alias"])
def test_to_a_part_of_a_leaf(through):
    """Between the places at which fingerprints look. An alias has a version of its own."""
    x = torch.rand(SIZE, requires_grad=True)
    between = slice(4, SIZE // 63 - 4)

    def program(entered, pause):
        leaf = torch.full((SIZE,), 0.5)
        read = leaf.data if through == "an alias" else leaf

        def hook(gradient):
            time.sleep(pause)
            read[between].erfinv_()

        return two_regions(x, lambda x: (x + leaf + read).exp().mean(), hook, entered)

    assert_outcomes_are_exact(program, may_raise=True)


@pytest.mark.parametrize("through", ["itself", "an alias"])
def test_an_error_is_raised_each_time_and_leaves_no_bytes_in_the_budget(through):
    x, leaf = torch.rand(SIZE, requires_grad=True), torch.rand(SIZE)
    read = leaf if through == "itself" else leaf.data  # which has a version of its own

    def hook(gradient):
        wait_for_replays()
        read.add_(1)

    with replays_ahead():
        with region():
            h = (x + leaf + read).exp().mean()
        h.register_hook(hook)
        with region():
            out = (h * 2).sin()
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"modified by an inplace.*ahead of backward"):
                torch.autograd.grad(out, x, retain_graph=True)
            assert ebb.stats()["ahead"]["bytes"] == 0
        del out


@pytest.mark.parametrize("how", ["data", "numpy", "pointer", "set_", "DLPack"])
def test_that_puts_back_what_was_there(how):
    """Averages of weights are put in place for a moment, say. No version moves."""
    x, leaf, other = torch.rand(SIZE, requires_grad=True), torch.rand(SIZE), torch.rand(SIZE)
    kept = leaf.clone()

    def alias():
        if how == "data":
            return leaf.data
        if how == "numpy":
            return torch.from_numpy(leaf.numpy())
        if how == "set_":
            return torch.empty(0).set_(leaf)
        if how == "DLPack":
            return torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(leaf))
        return torch.empty(0).set_(leaf.untyped_storage(), 0, (SIZE,))

    def program(entered, pause):
        def hook(gradient):
            time.sleep(pause)
            alias().copy_(other)
            alias().copy_(kept)

        return two_regions(x, lambda x: (x + leaf).exp().mean(), hook, entered)

    assert_outcomes_are_exact(program)


def test_that_is_marked_as_opaque():
    x, other = torch.rand(SIZE, requires_grad=True), torch.rand(SIZE)
    leaf = torch.rand(SIZE)
    alias, kept = leaf.numpy(), leaf.clone()

    def program(entered, pause):
        def hook(gradient):
            time.sleep(pause)
            with ebb.opaque(leaf):
                alias[:] = other.numpy()

        alias[:] = kept.numpy()
        return two_regions(x, lambda x: (x + leaf).exp().mean(), hook, entered)

    assert_outcomes_are_exact(program, may_raise=True)


def test_opaque_writes_know_nothing_of_ahead():
    """What is remembered of storages is no reason to move a version."""
    x = torch.rand(8, requires_grad=True)
    with replays_ahead():
        y = torch.rand(8)
        _ = y.data
        h = (x * y).sin()
        version = y._version
        with ebb.opaque(y):
            pass
        assert y._version == version
        h.sum().backward()


@pytest.fixture
def slow_sine():
    """A kernel of aten::sin that reads one half of its input, and the other one later."""

    def sine(x):
        if x.dim() == 0:
            return torch.cos(x - 1.5)
        first, second = x.chunk(2)
        read = torch.cos(first - 1.5)
        time.sleep(0.01)
        return torch.cat([read, torch.cos(second - 1.5)])

    with kernel("sin", sine):
        yield


def write_and_put_back(leaf, alias, kept):
    now = leaf.data
    now.fill_(3.0)
    time.sleep(0.01)
    now.copy_(kept)


def write_unseen(leaf, alias, kept):
    with ebb.opaque(leaf):
        alias.fill(3.0)


UNDER_A_KERNEL = {
    "a write": lambda leaf, alias, kept: leaf.fill_(3.0),
    "a write that is put back": write_and_put_back,
    "an opaque write": write_unseen,
}


@pytest.mark.parametrize("write", UNDER_A_KERNEL.values(), ids=UNDER_A_KERNEL)
def test_no_half_of_a_write_is_read(write, slow_sine):
    """The write comes when the worker's kernel has read one half."""
    x = torch.rand(1, requires_grad=True)
    kept = torch.rand(8)

    def program(entered):
        leaf = kept.clone()
        alias = leaf.numpy()

        def hook(gradient):
            time.sleep(0.005)
            write(leaf, alias, kept)

        return two_regions(x, lambda x: (x * leaf.sin()).mean(), hook, entered)

    expected = program(contextlib.nullcontext)
    with replays_ahead():
        for _ in range(6):
            try:
                assert same_bits(program(region), expected)
            except RuntimeError as error:
                assert write is not write_and_put_back
                assert "modified by an inplace operation" in str(error)  # noqa: PT017


class TwoLooks:
    """A kernel of aten::sin on a vector. Ahead it reads one half of its input, and the other one
    when the program has written: each waits for the other a while."""

    def __init__(self):
        self.program = threading.get_ident()
        self.begin()

    def begin(self):
        self.has_read, self.written, self.has_read_all, self.put_back = (
            threading.Event() for _ in range(4)
        )

    def __call__(self, x):
        if x.dim() == 0 or threading.get_ident() == self.program:
            return torch.cos(x - 1.5)
        first, second = x.chunk(2)
        read = torch.cos(first - 1.5)
        self.has_read.set()
        self.written.wait(0.1)
        rest = torch.cos(second - 1.5)
        self.has_read_all.set()
        self.put_back.wait(0.1)
        return torch.cat([read, rest])

    def write(self, alias, kept):
        alias.fill_(3.0)
        self.written.set()
        self.has_read_all.wait(0.1)
        alias.copy_(kept)
        self.put_back.set()


@pytest.fixture
def two_looks():
    looks = TwoLooks()
    with kernel("sin", looks):
        yield looks


@pytest.mark.parametrize("taken", ["while it is read", "before"])
def test_through_an_alias_while_a_kernel_reads(taken, two_looks):
    """What was there is put back before the kernel has returned: no look at the input shows it."""
    x, leaf = torch.rand(1, requires_grad=True), torch.rand(8)
    kept = leaf.clone()

    def program(entered):
        with entered():
            h = (x * leaf.sin()).mean()
        alias = leaf.data if taken == "before" else None

        def hook(gradient):
            if entered is region:  # eager has no reader to wait for
                two_looks.has_read.wait(0.2 if taken == "before" else 10)
            two_looks.write(leaf.data if alias is None else alias, kept)

        h.register_hook(hook)
        with entered():
            out = (h * 2).sin()
        return torch.autograd.grad(out, x)[0]

    expected = program(contextlib.nullcontext)
    two_looks.begin()
    ebb._C.stop_ahead()  # a worker that has another number of threads would end first
    with replays_ahead():
        assert same_bits(program(region), expected)
    assert two_looks.has_read.is_set() == (taken != "before")


def test_an_alias_does_not_wait_for_what_does_not_read_it():
    """The next recipe is about to run, and reads something else."""
    program, ran = threading.get_ident(), []
    has_read = threading.Event()
    at_once = []

    def sine(x):
        if threading.get_ident() != program:
            ran.append(x)
            has_read.set()
        return torch.cos(x - 1.5)

    x, one, other = torch.rand(8, requires_grad=True), torch.rand(8), torch.rand(8)

    def hook(gradient):
        assert has_read.wait(10)
        time.sleep(0.02)
        _ = one.data
        at_once.append(len(ran) == 1)

    # The second recipe has nearly all of the delay.
    with kernel("sin", sine), replays_ahead(), delays(1_036_888):
        two_regions(x, lambda x: x * one.sin() + x * other.sin(), hook)
    assert at_once == [True]
