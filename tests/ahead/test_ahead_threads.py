"""The worker's life: delays, ends, forks, other numbers of threads, and what it waits for."""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import random
import re
import subprocess
import sys
import time

import pytest
import torch
from ahead_programs import WaitInBackward, blocks, counts, parameters, replays_ahead
from exactness import TESTS, resident_kib, same_bits

import ebb
from ebb._region import commotion

X = (2, 6, 16)


def region():
    return ebb.region(ebb.policies.recompute_all)


def step(modules, x, entered=region):
    h = x
    for module in modules:
        with entered():
            h = module(h)
    loss = h.square().sum()
    return [loss.detach(), *torch.autograd.grad(loss, [*parameters(modules), x])]


def same(found, expected):
    return all(map(same_bits, found, expected))


@contextlib.contextmanager
def delays(microseconds):
    ebb._C._testing.delay_replays_ahead(microseconds)
    try:
        yield
    finally:
        ebb._C._testing.delay_replays_ahead(0)


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
                ebb.ahead.configure(regions=1 + number % 3)
                assert same(once(region), expected), number
        gc.collect()

    with replays_ahead():
        did = counts(program)
    assert did["regions_late"] > 20, did
    assert did["regions_in_time"] > 500, did
    assert did["failures"] == 0
    assert ebb.ahead.stats()["bytes"] == 0


def test_nothing_grows():
    modules, x = blocks(3), torch.randn(X, requires_grad=True)
    with replays_ahead(2):
        for _ in range(50):
            step(modules, x)
        before = resident_kib()
        for _ in range(400):
            step(modules, x)
        assert resident_kib() - before < 4096
    assert ebb.ahead.stats()["workers"] <= 1


def test_it_ends_when_told_and_starts_again():
    modules, x = blocks(3), torch.randn(X, requires_grad=True)
    expected = step(modules, x, contextlib.nullcontext)
    with replays_ahead():
        for _ in range(5):
            assert same(step(modules, x), expected)
            ebb._C.stop_ahead()
            assert ebb.ahead.stats()["workers"] == 0


def test_it_has_the_number_of_threads_that_the_forward_had():
    modules, x = blocks(4), torch.randn(X, requires_grad=True)

    def program():
        h = x
        for module in modules:
            with region():
                h = module(WaitInBackward.apply(h))
        h.sum().backward()

    with replays_ahead():
        for threads in (1, 2, 1, 2):
            torch.set_num_threads(threads)
            assert counts(program)["regions_in_time"] + counts(program)["regions_in_time"] >= 3


def in_a_process(script, **environment):
    path = [str(TESTS / "support"), *sys.path]
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path)} | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


SETUP = """
import os, sys, torch, ebb
from ahead_programs import *
torch.set_num_threads(1)
ebb.ahead.configure(regions=2, busy_cores=True)
ebb._C._testing.delay_replays_ahead(3000)
modules, x = blocks(6), torch.randn(2, 6, 16, requires_grad=True)
def forward():
    h = x
    for module in modules:
        with ebb.region(ebb.policies.recompute_all):
            h = module(h)
        h.register_hook(hook)
    return h.sum()
"""


@pytest.mark.parametrize(
    "end",
    ["sys.exit(3)", "os._exit(3)", "raise SystemExit(3)", "threading._shutdown(); sys.exit(3)"],
)
def test_the_interpreter_ends_while_it_works(end):
    script = (
        "import threading\n"
        + SETUP
        + f"""
seen = []
def hook(g):
    seen.append(g)
    if len(seen) == 3:
        {end}
try:
    forward().backward()
finally:
    print(ebb.ahead.stats()["workers"], flush=True)
"""
    )
    done = in_a_process(script)
    assert done.returncode == 3, done.stderr
    assert done.stdout.strip() in ("1", ""), done.stderr


def test_the_program_ends_with_work_left():
    done = in_a_process(
        SETUP
        + """
def hook(g):
    raise KeyError("over")
loss = forward()
try:
    loss.backward()
except KeyError:
    pass
ebb._C._testing.replay_when_closed(True)
loss = forward()
"""
    )
    assert done.returncode == 0, done.stderr


FORKS = (
    SETUP
    + """
@torch.enable_grad()
def child():
    global hook
    hook = lambda g: None
    for p in parameters(modules):
        p.grad = None
    forward().backward()
    mine = [p.grad.clone() for p in parameters(modules)]
    for p in parameters(modules):
        p.grad = None
    h = x
    for module in modules:
        h = module(h)
    h.sum().backward()
    assert all(torch.equal(a, p.grad) for a, p in zip(mine, parameters(modules)))
    assert ebb.ahead.stats()["workers"] == 1
    os._exit(0)

seen = []
children = []
def hook(g):
    seen.append(g)
    if len(seen) in (2, 3, 4):
        pid = os.fork()
        if pid == 0:
            try:
                child()
            except BaseException as error:
                print(repr(error), file=sys.stderr, flush=True)
                os._exit(1)
        children.append(pid)

forward().backward()
assert len(children) == 3
assert all(os.waitpid(pid, 0)[1] == 0 for pid in children)
print("done")
"""
)


def test_children_of_fork_have_workers_of_their_own():
    for _ in range(3):
        done = in_a_process(FORKS)
        assert done.returncode == 0, done.stderr
        assert done.stdout == "done\n"


def test_a_graph_that_is_being_replayed_at_a_fork_is_whole_in_both():
    done = in_a_process(
        SETUP
        + """
ebb._C._testing.delay_replays_ahead(100000)
ebb._C._testing.replay_when_closed(True)
def hook(g): pass
expected = torch.autograd.grad(modules[0](x).sum(), x)[0]
with ebb.region(ebb.policies.recompute_all):
    h = modules[0](x)
loss = h.sum()
import time
time.sleep(0.05)
pid = os.fork()
same = torch.equal(torch.autograd.grad(loss, x)[0], expected)
if pid == 0:
    os._exit(0 if same else 1)
assert os.waitpid(pid, 0)[1] == 0
assert same
"""
    )
    assert done.returncode == 0, done.stderr


def test_threads_fork_while_others_train():
    done = in_a_process(
        SETUP
        + """
import threading, time
ebb._C._testing.delay_replays_ahead(200)
def hook(g): pass
end = time.monotonic() + 3
forks, steps = [], []
def fork():
    while time.monotonic() < end:
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)
        forks.append(pid)
def train():
    while time.monotonic() < end:
        h = torch.randn(2, 6, 16, requires_grad=True)
        for module in modules:
            with ebb.region(ebb.policies.recompute_all):
                h = module(h)
        steps.append(torch.autograd.grad(h.sum(), parameters(modules)))
        steps.clear()
threads = [threading.Thread(target=t) for t in (fork, fork, train, train)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(len(forks) > 5)
"""
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "True\n"


def test_setters_are_pickled_by_name():
    commotion.install()
    assert pickle.loads(pickle.dumps(torch.set_num_threads)) is torch.set_num_threads


@pytest.mark.parametrize("first", [False, True])
def test_denormals_are_flushed_by_whom_they_were(first):
    """Intra-op threads have the mode with which they were born, the worker's too."""
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
                assert same(program(region), expected)
        finally:
            torch.set_flush_denormal(False)


# What must not happen under a replay.


def test_settings_change_for_a_moment_in_a_hook():
    """Backward switches oneDNN off and on again while the worker is at a convolution."""
    torch.manual_seed(1)
    convolutions = [torch.nn.Conv2d(8, 8, 3, padding=1) for _ in range(4)]
    x = torch.randn(2, 8, 16, 16, requires_grad=True)

    class Flicker(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, gradient):
            while not ebb._C._testing.replays_ahead_are_idle():
                torch.backends.mkldnn.set_flags(False)
                torch.backends.mkldnn.set_flags(True)
            return gradient

    def program(entered):
        h = x
        for convolution in convolutions:
            with entered():
                h = convolution(Flicker.apply(h)).sin().exp().sin()
        return [h.detach(), *torch.autograd.grad(h.sum(), [*parameters(convolutions), x])]

    expected = program(contextlib.nullcontext)
    with replays_ahead(), delays(30):
        for _ in range(100):
            assert same(program(region), expected)


def test_other_settings_than_in_the_forward_are_left_to_backward():
    x = torch.randn(2, 8, 16, 16, requires_grad=True)
    convolutions = [torch.nn.Conv2d(8, 8, 3, padding=1) for _ in range(3)]

    def program(entered):
        h = x
        with torch.backends.mkldnn.flags(enabled=False):
            for convolution in convolutions:
                with entered():
                    h = convolution(WaitInBackward.apply(h)).sin().exp()
        return [h.detach(), *torch.autograd.grad(h.sum(), [*parameters(convolutions), x])]

    expected = program(contextlib.nullcontext)
    with replays_ahead():
        found = []
        did = counts(lambda: found.extend(program(region)))
    assert same(found, expected)
    assert did["regions_in_time"] == 0


def test_a_storage_that_is_resized_by_hand_is_not_read_ahead():
    w = torch.randn(16, 16)
    x = torch.randn(4, 16, requires_grad=True)
    full = w.clone()

    def refill(gradient):
        w.untyped_storage().resize_(w.numel() * 4)
        with torch.autograd._unsafe_preserve_version_counter(w):
            w.copy_(full)

    def program(entered, shards):
        h = x
        for _ in range(3):
            with entered():
                h = (WaitInBackward.apply(h) @ w).sin().exp().sin()
            h.register_hook(refill)
            if shards:
                w.untyped_storage().resize_(0)
                refill(None)
        return [h.detach(), *torch.autograd.grad(h.sum(), x)]

    expected = program(contextlib.nullcontext, False)
    with replays_ahead():
        found = []
        did = counts(lambda: found.extend(program(region, True)))
    assert same(found, expected)
    assert did["regions_stopped"] > 0
    assert did["regions_in_time"] == 0


def test_memory_that_backward_gives_back_while_it_is_read():
    """resize_ waits for the recipe that reads: else the memory is gone under the kernel."""
    x = torch.randn(1, requires_grad=True)
    draw = random.Random(1)

    class GivesBack(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, plain):
            ctx.plain = plain
            return x.view_as(x)

        @staticmethod
        def backward(ctx, gradient):
            time.sleep(draw.random() * 0.01)
            ctx.plain.untyped_storage().resize_(0)
            return gradient, None

    outcomes = []
    with replays_ahead():
        for _ in range(30):
            plain = torch.randn(1 << 20)
            with region():
                y = (x * plain).sin().exp().sin().sum()
            with region():
                y = (GivesBack.apply(y, plain) * 2).sin()
            try:
                outcomes.append(torch.autograd.grad(y, x)[0])
            except RuntimeError as error:
                outcomes.append("was resized" in str(error))
    assert all(outcome is True or outcome.isfinite().all() for outcome in outcomes)
    assert True in outcomes


# Setters of torch._C that need not wait, and why.
HARMLESS = re.compile(
    r"_set_(autograd_fallback_mode|backcompat_\w+|cached_tensors_enabled|dispatch_mode"
    r"|check_sparse_tensor_invariants|conj|neg|default_mobile_cpu_allocator|fwd_grad_enabled"
    r"|fake_constant|storage_data_ptr_access_error_msg|storage_access_error_msg"
    r"|dtensor_allow_implicit_replication|generator_metaclass|grad_enabled|graph_exec\w*"
    r"|grad_layout_enforcement_enabled|graph_executor_optimize|meta_in_tls_dispatch_include"
    r"|multithreading_enabled|only_lift_cpu_tensors|override_stale_capture_stream|print_stack\w+"
    r"|should_use_format_with_string_table|skip_next_torch_function|tensor_metadata|thread_name"
    r"|throw_on_mutable_data_ptr|torch_function_state|tracing_state|value_trace"
    r"|view_replay_enabled|warn\w+|worker_pids|worker_signal_handlers)"
    r"|set_(anomaly_enabled|autocast_\w+|flush_denormal|num_interop_threads)"
)


def test_every_setter_of_torch_waits_or_need_not():
    setters = {name for name in dir(torch._C) if re.match(r"_?set_", name)}
    assert {n for n in setters if not HARMLESS.fullmatch(n)} <= set(commotion.SETTERS)
    assert not [name for name in commotion.SETTERS if HARMLESS.fullmatch(name)]


def test_setters_wait_wherever_torch_has_them():
    commotion.install()
    waiting = {
        name: getattr(torch._C, name) for name in commotion.SETTERS if hasattr(torch._C, name)
    }
    assert len(waiting) > 20
    for name, setter in waiting.items():
        original = setter.args[0]  # of the partial
        for module in list(sys.modules.values()):
            if module.__name__.startswith("torch"):
                assert vars(module).get(name) is not original
