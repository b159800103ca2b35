"""State of the whole process, and memory, that must not change during a replay ahead."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from functools import partial

import pytest
import torch

import ebb
from ebb import _testing
from ebb_tests.programs.ahead import (
    WaitInBackward,
    all_same,
    assert_exact_ahead,
    chain,
    counts_ahead,
    give_other_memory,
    in_backward,
    parameters,
    region,
    two_regions,
)
from ebb_tests.replays import delays, replays_ahead, wait_for_replays
from ebb_tests.stand_ins import kernel


def test_settings_that_change_briefly_in_a_hook_change_no_bits():
    """Backward switches oneDNN off and on again while the worker is at a convolution."""
    torch.manual_seed(1)
    convolutions = [torch.nn.Conv2d(8, 8, 3, padding=1) for _ in range(4)]
    x = torch.randn(2, 8, 16, 16, requires_grad=True)

    def flicker():
        while not _testing.replays_ahead_are_idle():
            torch.backends.mkldnn.set_flags(False)
            torch.backends.mkldnn.set_flags(True)

    def program(entered):
        h = x
        for convolution in convolutions:
            with entered():
                h = convolution(in_backward(h, flicker)).sin().exp().sin()
        return [h.detach(), *torch.autograd.grad(h.sum(), [*parameters(convolutions), x])]

    expected = program(contextlib.nullcontext)
    with replays_ahead(), delays(30):
        for _ in range(100):
            assert all_same(program(region), expected)


def test_regions_under_other_settings_are_left_to_backward():
    x = torch.randn(2, 8, 16, 16, requires_grad=True)
    convolutions = [torch.nn.Conv2d(8, 8, 3, padding=1) for _ in range(3)]

    def program(entered):
        with torch.backends.mkldnn.flags(enabled=False):
            h = chain([lambda h, c=c: c(h).sin().exp() for c in convolutions], x, entered)
        return [h.detach(), *torch.autograd.grad(h.sum(), [*parameters(convolutions), x])]

    did = assert_exact_ahead(program)
    assert did["regions_in_time"] == 0


@pytest.mark.parametrize("when", ["between_regions", "and_an_alias_is_taken", "before_the_forward"])
def test_storage_resized_by_hand_is_not_read_ahead(when):
    """An alias that is taken of it later is no reason to read it, also in graphs of before."""
    w, x = torch.randn(16, 16), torch.randn(4, 16, requires_grad=True)
    full = w.clone()

    def resize_and_fill(gradient=None):
        w.untyped_storage().resize_(w.numel() * 4)
        with torch.autograd._unsafe_preserve_version_counter(w):
            w.copy_(full)

    def program(entered):
        if entered is region and when == "before_the_forward":
            w.untyped_storage().resize_(w.numel() * 4)
            _ = w.data
        h = x
        for _ in range(3):
            with entered():
                h = (WaitInBackward.apply(h) @ w).sin().exp().sin()
            if when != "before_the_forward":
                h.register_hook(resize_and_fill)
                if entered is region:
                    w.untyped_storage().resize_(0)
                    resize_and_fill()
            if when == "and_an_alias_is_taken":
                _ = w.data
        return [h.detach(), *torch.autograd.grad(h.sum(), x)]

    did = assert_exact_ahead(program)
    assert did["regions_stopped"] > 0
    assert did["regions_in_time"] == 0


def test_storage_with_other_memory_is_not_read_ahead():
    w, x = torch.randn(16, 16), torch.randn(4, 16, requires_grad=True)
    full = w.clone()

    def fill(gradient):
        with torch.autograd._unsafe_preserve_version_counter(w):
            w.copy_(full)

    def program(entered):
        with entered():
            h = (WaitInBackward.apply(x) @ w).sin().exp().sin()
        h.register_hook(fill)
        with entered():
            h = WaitInBackward.apply(h).sin().exp()
        give_other_memory(w)
        return [h.detach(), *torch.autograd.grad(h.sum(), x)]

    did = assert_exact_ahead(program)
    assert did["regions_stopped"] == 1
    assert did["failures"] == did["regions_in_time"] == 0


def test_resize_waits_for_the_recipe_that_reads():
    """Otherwise the memory is gone under the kernel."""
    x = torch.randn(1, requires_grad=True)
    draw = random.Random(1)

    def give_back(plain):
        time.sleep(draw.random() * 0.01)
        plain.untyped_storage().resize_(0)

    outcomes = []
    with replays_ahead():
        for _ in range(30):
            plain = torch.randn(1 << 20)
            with region():
                y = (x * plain).sin().exp().sin().sum()
            with region():
                y = (in_backward(y, partial(give_back, plain)) * 2).sin()
            try:
                outcomes.append(torch.autograd.grad(y, x)[0])
            except RuntimeError as error:
                outcomes.append("was resized" in str(error))
    assert all(outcome is True or outcome.isfinite().all() for outcome in outcomes)
    assert True in outcomes


RAN_AHEAD = set()


@torch.library.custom_op("ebb_test::who_runs", mutates_args=())
def who_runs(x: torch.Tensor) -> torch.Tensor:
    RAN_AHEAD.add(is_ahead())
    return x * 2


who_runs.register_autograd(lambda ctx, gradient: gradient * 2)


def test_custom_operators_run_in_backwards_thread():
    x = torch.randn(4, requires_grad=True)
    policy = ebb.Policy({"ebb_test::who_runs": ebb.RECOMPUTE})
    RAN_AHEAD.clear()
    with replays_ahead():
        h = x
        for _ in range(3):
            with ebb.region(policy):
                h = who_runs(WaitInBackward.apply(h)).exp().sin()
        h.sum().backward()
    assert True not in RAN_AHEAD


def is_ahead():
    return threading.get_ident() != threading.main_thread().ident


@pytest.fixture
def python_sine():
    """Functions that a kernel of aten::sin in Python calls first, also in replays ahead."""
    acts = []

    def sine(x):
        for act in acts:
            act()
        return torch.cos(x - 1.5)

    with kernel("sin", sine):
        yield acts


def test_backward_repeats_a_write_whose_kernel_failed_ahead():
    failed = []

    def negate(x):
        if is_ahead():
            failed.append(None)
            raise RuntimeError("not here")
        return x.copy_(0 - x.clone())

    x = torch.randn(4, requires_grad=True)

    def step(entered):
        with entered():
            h = (x * 2).neg_().sin()
        with entered():
            h = WaitInBackward.apply(h).exp().exp()
        return torch.autograd.grad(h.sum(), x)

    expected = step(contextlib.nullcontext)
    with kernel("neg_", negate), replays_ahead():
        found = step(region)
    assert all_same(found, expected)
    assert failed


@pytest.mark.parametrize("who", ["the kernel", "the program"])
def test_setters_do_not_deadlock_with_a_kernel(who, python_sine):
    """The kernel that runs ahead calls the setter, or the program does while the kernel wants the
    GIL."""
    set_something = partial(torch.backends.mkldnn.set_flags, torch.backends.mkldnn.is_available())
    python_sine.append(set_something if who == "the kernel" else lambda: time.sleep(0.001))
    x = torch.randn(4, requires_grad=True)

    def hook(gradient):
        while not _testing.replays_ahead_are_idle():
            if who == "the program":
                set_something()
            time.sleep(1e-4)

    def program(entered):
        h = x
        for _ in range(4):
            with entered():
                h = h.sin().sin().exp().sin()
            h.register_hook(hook)
        return [h.detach(), *torch.autograd.grad(h.sum(), x)]

    expected = program(contextlib.nullcontext)
    found = []
    did = counts_ahead(lambda: [found.append(program(region)) for _ in range(5)])
    assert all(all_same(each, expected) for each in found)
    assert who == "the program" or did["regions_in_time"] > 0


def test_nothing_begins_ahead_while_process_state_changes(python_sine):
    ran_ahead = set()
    python_sine.append(lambda: ran_ahead.add(is_ahead()))
    x = torch.randn(4, requires_grad=True)
    _testing.replay_when_closed(True)
    try:
        with replays_ahead():
            ebb._C.begin_process_state_change()
            with region():
                h = x.sin().sin().exp()
            wait_for_replays()
            ebb._C.end_process_state_change()
            torch.autograd.grad(h.sum(), x)
    finally:
        _testing.replay_when_closed(False)
    assert ran_ahead == {False}


def test_nothing_runs_ahead_while_process_state_changes(python_sine):
    """As during a graph's capture: see global_state_guard.py."""
    now, seen = [False], []

    def look():
        time.sleep(0.001)
        seen.append(now[0])

    def hook(gradient):
        time.sleep(0.002)
        ebb._C.begin_process_state_change()
        now[0] = True
        time.sleep(0.03)
        now[0] = False
        ebb._C.end_process_state_change()

    python_sine.append(look)
    h = torch.randn(4, requires_grad=True)
    with replays_ahead():
        for _ in range(8):
            with region():
                factor = h.detach()
                for _ in range(20):
                    factor = factor.sin()
                h = h * factor
            h.register_hook(hook)
        h.sum().backward()
    assert len(seen) > 8 * 20  # so many in the forward
    assert True not in seen


def test_change_of_process_state_waits_for_one_recipe_only(python_sine):
    """Though a value needs many recipes."""
    ran, ended, at_once, in_its_midst = [], [], [], []
    runs = threading.Event()

    def look():
        if is_ahead():
            ran.append(None)
            runs.set()
            time.sleep(0.005)
            ended.append(None)

    def hook(gradient):
        assert runs.wait(10)
        before = len(ran)
        ebb._C.begin_process_state_change()
        at_once.append(len(ran) - before)
        in_its_midst.append(len(ran) - len(ended))
        ebb._C.end_process_state_change()

    def body(x):
        factor = x.detach()
        for _ in range(20):
            factor = factor.sin()
        return x * factor

    python_sine.append(look)
    with replays_ahead():
        two_regions(torch.randn(4, requires_grad=True), body, hook)
    assert at_once[0] <= 1
    assert in_its_midst == [0]


def share(x):
    _testing.show_memory(torch.empty(4), torch.empty(4))


def empty_an_escape(x):
    with ebb.region(ebb.policies.recompute_all, escapes="placeholder"):
        escape = x.exp()
        result = escape.cos()
    with pytest.raises(RuntimeError, match="was read before backward restored it"):
        escape.numpy(force=True)
    return result


@pytest.mark.parametrize("moves_memory", [share, empty_an_escape])
def test_memory_that_ebb_moves_stays_until_the_recipe_has_run(moves_memory, python_sine):
    runs, at_the_end, seen = threading.Event(), [], []

    def look():
        if is_ahead() and not runs.is_set():
            runs.set()
            time.sleep(0.1)
            at_the_end.append(len(seen))

    def hook(gradient):
        assert runs.wait(10)
        with torch.enable_grad():
            moves_memory(x)
        seen.append(None)

    python_sine.append(look)
    x = torch.randn(4, requires_grad=True)
    with replays_ahead():
        two_regions(x, lambda x: x.sin().sin().exp(), hook)
    assert at_the_end == [0]


def test_backward_waits_for_the_kernel_ahead_before_it_changes_settings(python_sine):
    begun, seen = threading.Event(), []
    enabled = torch._C._get_mkldnn_enabled

    def look():
        if not is_ahead():
            time.sleep(0.2 if begun.is_set() else 0)
        else:
            before = enabled()
            begun.set()
            time.sleep(0.1)
            seen.append(before == enabled())

    python_sine.append(look)
    x = torch.randn(4, requires_grad=True)
    with replays_ahead():
        with region():
            h = x.sin().sin()
        with region():
            with torch.backends.mkldnn.flags(enabled=False):
                product = h * x.detach().sin()
            h = product + (x * 2).exp()  # where backward arrives
        product.register_hook(lambda gradient: begun.wait(10) and None)
        with region():
            h = h.exp()
        h.sum().backward()
    assert seen == [True]
