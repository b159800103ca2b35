"""OFFLOAD: graphs that die early, fail, or are used twice."""

from __future__ import annotations

import contextlib
import random

import pytest
import torch

import ebb
from ebb_tests.other_threads import together
from ebb_tests.programs.ahead import in_a_process
from ebb_tests.programs.offloaded import (
    OFFLOAD_ALL,
    SINES,
    assert_exact,
    assert_nothing_is_away,
    chain_of_sines,
    check_random_schedule,
    drawn_settings,
    finish_copies,
    forward,
    gradients,
)
from ebb_tests.stand_ins import fake_accelerator
from ebb_tests.time_limits import HANGS


def test_storage_freed_between_two_backwards_raises(accelerator, x):
    """The first one needs no copy, since the program holds it."""
    with ebb.region(OFFLOAD_ALL):
        h = x.sin()
        y = h.cos().sum()
    accelerator.advance(1000)
    torch.autograd.grad(y, x, retain_graph=True)
    h.untyped_storage().resize_(0)

    message = r"the storage of the output of aten::sin.*in region.*was freed or resized after"
    with pytest.raises(RuntimeError, match=message):
        torch.autograd.grad(y, x)


@pytest.mark.parametrize("advance", [0, 1, 3, 1000])
@pytest.mark.parametrize("keep", [0, 2])
def test_forward_without_backward_leaves_no_values(advance, keep, no_objects_left, x):
    with fake_accelerator(keep_last=keep) as fake:
        for _ in range(3):
            y = forward(x)
            fake.advance(advance)
            del y
        fake.advance(1000)
        assert_nothing_is_away()


@pytest.mark.parametrize("keep", [0, 200])
def test_dropped_values_are_neither_sent_nor_fetched(keep, x):
    """Something else is there soon."""
    with fake_accelerator(keep_last=keep) as fake:
        for _ in range(5):
            y = forward(x, 200, SINES)
            finish_copies(fake)
            del y
        before = fake.counts()
        other, y = forward(x, 200, ebb.Policy()), forward(x, 200, SINES)
        for loss in (y, other):
            assert_exact(loss, x, 200)
        finish_copies(fake)
        after = fake.counts()
        assert after["copies_out"] - before["copies_out"] == (0 if keep else 200)
        last = 200 % 16  # those of the last stretch are served from the device
        assert after["copies_in"] == (0 if keep else 200 - last)


def test_exception_in_a_region_leaves_no_values(accelerator, no_objects_left, x):
    with contextlib.suppress(ZeroDivisionError), ebb.region(OFFLOAD_ALL):
        y = chain_of_sines(x)
        raise ZeroDivisionError
    accelerator.advance(2)
    y = forward(x)
    y.backward()
    del y
    accelerator.advance(1000)

    assert_nothing_is_away()


def test_no_grad_offloads_nothing(accelerator, x):
    with torch.no_grad(), ebb.region(ebb.Policy(default=ebb.OFFLOAD)):
        for _ in range(10):
            chain_of_sines(x)
    accelerator.advance(1000)

    assert ebb.stats()["offload"]["stashes"] == 0


@pytest.mark.parametrize("seed", range(10))
def test_random_schedules_on_several_streams(seed):
    draw = random.Random(seed)
    x = torch.randn(8, requires_grad=True)
    with fake_accelerator(**drawn_settings(draw)) as fake:
        actions = ["advance", "stream", "fail"]
        check_random_schedule(draw, x, steps=1000, actions=actions, fake=fake)
        fake.use_stream(0)
        fake.advance(1 << 30)
        assert_nothing_is_away()


def test_threads_train_at_once(accelerator):
    """Each trains for itself; the engine is shared."""
    wrong = []

    def train(seed):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(64, generator=generator).requires_grad_()
        expected = gradients(chain_of_sines(x, 5).sum(), x)[0]
        for _ in range(100):
            y = forward(x, 5)
            accelerator.advance(3)
            if not torch.equal(gradients(y, x)[0], expected):
                wrong.append(seed)

    together(train, 4)

    assert not wrong
    finish_copies(accelerator)
    assert_nothing_is_away()


def test_backward_works_after_an_allocation_for_a_fetch_failed(accelerator):
    x = torch.randn(64, requires_grad=True)
    with ebb.region(OFFLOAD_ALL):
        y = chain_of_sines(x, 5)
    finish_copies(accelerator)
    accelerator.fail_allocations_after(1)
    assert y.grad_fn._saved_self is not None
    with pytest.raises(RuntimeError, match="device has no memory"):
        torch.autograd.grad(y.sum(), x, retain_graph=True)
    accelerator.fail_allocations_after(1 << 30)
    assert_exact(y.sum(), x, 5)


@pytest.mark.sweep
def test_storages_that_python_has_seen_do_not_deadlock_threads():
    """Their last reference takes the GIL, and whoever holds that may wait for the engine."""
    program = (
        "import threading, torch, ebb\n"
        "from ebb_tests.stand_ins import fake_accelerator\n"
        "class Save(torch.autograd.Function):\n"
        "    @staticmethod\n"
        "    def forward(ctx, x): ctx.save_for_backward(x); return x * 2\n"
        "    @staticmethod\n"
        "    def backward(ctx, g): return g * 2\n"
        "def f(x):\n"
        "    for _ in range(20):\n"
        "        x = x.sin(); x.untyped_storage(); x = Save.apply(x); x.untyped_storage()\n"
        "    return x\n"
        "x = torch.randn(2000, requires_grad=True)\n"
        "def forward():\n"
        "    with ebb.region(ebb.Policy(default=ebb.OFFLOAD)): return f(x)\n"
        "trained = threading.Event()\n"
        "def only_forwards():\n"
        "    while not trained.is_set(): forward()\n"
        "with fake_accelerator(in_flight_bytes=0):\n"
        "    thread = threading.Thread(target=only_forwards)\n"
        "    thread.start()\n"
        "    for _ in range(300): torch.autograd.grad(forward().sum(), x)\n"
        "    trained.set(); thread.join()\n"
        "print('done')\n"
    )
    done = in_a_process(program, seconds=HANGS)
    assert done.stdout == "done\n", done.stderr


@pytest.mark.parametrize("keep", [0, 2])
def test_values_outlive_the_accelerator(keep, tmp_path):
    """Its memory is the accelerator's, and nobody else may take it for theirs."""
    x = torch.randn(64, requires_grad=True)
    with fake_accelerator(keep_last=keep):
        y = forward(x)
    ebb.config.update(offload_disk=str(tmp_path), offload_min_bytes=1)
    z = forward(x)

    assert_exact(y, x)
    assert_exact(z, x)


def test_values_of_earlier_accelerators_come_back():
    x = torch.randn(64, requires_grad=True)
    graphs = []
    for _ in range(3):
        with fake_accelerator() as fake, ebb.region(OFFLOAD_ALL):
            graphs.append(chain_of_sines(x))
            finish_copies(fake)

    for y in graphs:
        assert_exact(y.sum(), x)
