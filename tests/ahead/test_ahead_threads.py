"""The worker's life: delays, ends, forks, other numbers of threads, and what it waits for."""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import random
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from ahead_programs import (
    WaitInBackward,
    blocks,
    counts,
    delays,
    parameters,
    replays_ahead,
    wait_for_replays,
)
from exactness import TESTS, resident_kib, same_bits
from memory_use import least_growth

import ebb
from ebb import _testing
from ebb._region import commotion
from paging import Keep

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


@pytest.mark.not_sanitized  # what sanitizers remember grows
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

    def program():
        h = x
        for module in modules:
            with region():
                h = module(WaitInBackward.apply(h))
        h.sum().backward()

    with replays_ahead():
        for _ in range(5):
            assert same(step(modules, x), expected)
            assert counts(program)["regions_in_time"] == 2
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


def test_the_number_of_threads_stays_as_it_was_set():
    """A worker that had another number would have to set it, which threads begin with."""
    modules, x = blocks(4), torch.randn(X, requires_grad=True)
    with replays_ahead():
        for threads in (1, 2, 1, 2):
            torch.set_num_threads(threads)
            step(modules, x)
            wait_for_replays()
            with ThreadPoolExecutor(1) as pool:
                assert pool.submit(torch.get_num_threads).result() == threads


def test_warnings_of_the_forward_are_not_given_again(capfd):
    """Of the worker's own thread they would go to where nobody has asked for them."""
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


def in_a_process(script, *, seconds=120, **environment):
    path = [str(TESTS / "support"), *sys.path]
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path)} | environment,
        capture_output=True,
        text=True,
        timeout=seconds,
    )


SETUP = """
import os, sys, torch, ebb._testing
from ahead_programs import *
torch.set_num_threads(1)
ebb.ahead.configure(regions=2, busy_cores=True)
ebb._testing.delay_replays_ahead(3000)
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
ebb._testing.replay_when_closed(True)
loss = forward()
"""
    )
    assert done.returncode == 0, done.stderr


def test_none_starts_when_the_interpreter_ends():
    done = in_a_process(
        """
import atexit
atexit.register(lambda: at_the_end())  # runs after ebb's own
"""
        + SETUP
        + """
def hook(g): pass
def at_the_end():
    forward().backward()
    print(ebb.ahead.stats()["workers"], flush=True)
forward().backward()
print(ebb.ahead.stats()["workers"], flush=True)
"""
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["1", "0"]


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


@pytest.mark.parametrize("fork", ["os.fork()", "ctypes.PyDLL(None).fork()"])
def test_a_graph_that_is_being_replayed_at_a_fork_is_whole_in_both(fork):
    """Python, which has hooks of its own, need not be told of it."""
    done = in_a_process(
        "import ctypes\n"
        + SETUP
        + f"""
ebb._testing.delay_replays_ahead(100000)
ebb._testing.replay_when_closed(True)
def hook(g): pass
expected = torch.autograd.grad(modules[0](x).sum(), x)[0]
with ebb.region(ebb.policies.recompute_all):
    h = modules[0](x)
loss = h.sum()
import threading
import time
time.sleep(0.05)
pid = {fork}
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
ebb._testing.delay_replays_ahead(200)
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


def test_denormals_are_not_flushed_because_who_starts_the_worker_does():
    """Its intra-op threads are born when rows come back, before any recipe runs."""
    done = in_a_process("""
import torch, ebb
from ahead_programs import *
from paging import PRODUCTS
torch.set_num_threads(2)
rows = 1 << 14
x, w = torch.rand(rows, 16), torch.rand(16, 16, requires_grad=True)
factor = torch.rand(rows, 16, requires_grad=True)

def hook(gradient):
    torch.set_flush_denormal(False)
    wait_for_replays()

def program(region, starts):
    with region():
        h = ebb.mark_rows(x @ w, torch.tensor(rows - 1))
        h = h * 1e-39 * ebb.mark_rows(factor * 1, torch.tensor(rows - 1))
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
print(did["regions_in_time"], ebb.paging.stats()["stashed"])
""")
    assert done.stdout.split() == ["True", "1", "1"], done.stderr


def test_what_is_remembered_of_storages_goes_with_them():
    with replays_ahead():

        def aliases():
            for _ in range(50_000):
                _ = torch.empty(1).data

        aliases()
        assert least_growth(aliases) < 2000


def test_many_threads_read_and_have_hands_on_storages():
    assert _testing.hands_are_known(4, 300_000)


def test_references_are_counted_while_another_thread_has_hands_on_storages():
    """In a process of its own, which remembers them."""
    done = in_a_process("import ebb._testing; print(ebb._testing.hands_are_counted(1_000_000))")
    assert done.stdout == "True\n", done.stderr


def test_who_runs_ahead_is_known_while_others_begin_and_end():
    """A thread that does not find itself would wait for itself, for ever."""
    script = "import ebb._testing; print(ebb._testing.still_threads_are_known(1_000_000))"
    done = in_a_process(script, seconds=40)
    assert done.stdout == "True\n", done.stderr


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_region_that_backward_waits_for_is_not_begun():
    """One thread looks at what it has saved, which takes long; a backward waits for that; and
    another one comes by the region behind."""
    x = torch.randn(4, requires_grad=True)
    looks = threading.Event()

    def cosine(x):
        if looker is not None and threading.get_ident() == looker.ident:
            looks.set()
            time.sleep(0.5)
        return torch.sin(x + 1.5)

    looker = None
    library = torch.library.Library("aten", "IMPL")
    library.impl("cos", cosine, "CPU")
    try:
        with replays_ahead():
            with region():
                h = Keep.apply(x.cos())
                saved = Keep.last
            with region():
                out = h.exp().exp()

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

            did = counts(program)
    finally:
        library._destroy()
        Keep.last = None
    assert did["regions_held"] == 1
    assert did["regions_in_time"] == did["regions_late"] == did["regions_stopped"] == 0


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_backward_does_what_is_left():
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
        h.register_hook(lambda gradient: wait(begun))
        with region():
            h = h.exp().sin()
        h.sum().backward()

    def wait(event):
        event.wait(60)

    library = torch.library.Library("aten", "IMPL")
    library.impl("cos", cosine, "CPU")
    try:
        ebb._C.stop_ahead()  # a worker that has another number of threads would end first
        with replays_ahead(), delays(20_000):
            ebb.reset_stats()
            did = counts(program)
    finally:
        library._destroy()
    total = ebb.stats()["total"]
    assert begun.is_set()
    assert did["regions_late"] == 1
    assert 0 < total["ops_replayed_ahead"] < total["ops_replayed"]
