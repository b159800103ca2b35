"""The worker where its process ends or forks; each test in a process of its own."""

from __future__ import annotations

import pytest

from ebb_tests.programs.ahead import in_a_process

SETUP = """
import os, sys, torch, ebb._testing
from ebb_tests.programs.ahead import *
from ebb_tests.replays import *
torch.set_num_threads(1)
ebb.config.ahead.regions = 2
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


def after_setup(script, *, before="", returncode=0):
    """Runs the set-up and then `script`. Returns its standard output."""
    done = in_a_process(before + SETUP + script)
    assert done.returncode == returncode, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "end",
    [
        "sys.exit(3)",
        *(
            pytest.param(end, marks=pytest.mark.sweep)
            for end in ("os._exit(3)", "raise SystemExit(3)", "threading._shutdown(); sys.exit(3)")
        ),
    ],
)
def test_the_interpreter_ends_while_it_works(end):
    script = f"""
seen = []
def hook(g):
    seen.append(g)
    if len(seen) == 3:
        {end}
try:
    forward().backward()
finally:
    print(ebb.stats()["ahead"]["workers"], flush=True)
"""
    found = after_setup(script, before="import threading\n", returncode=3)
    assert found.strip() in ("1", "")


@pytest.mark.sweep
def test_the_program_ends_with_work_left():
    after_setup("""
def hook(g):
    raise KeyError("over")
loss = forward()
try:
    loss.backward()
except KeyError:
    pass
ebb._testing.replay_when_closed(True)
loss = forward()
""")


def test_none_starts_when_the_interpreter_ends():
    before = "import atexit\natexit.register(lambda: at_the_end())\n"  # runs after ebb's own
    script = """
def hook(g): pass
def at_the_end():
    forward().backward()
    print(ebb.stats()["ahead"]["workers"], flush=True)
forward().backward()
print(ebb.stats()["ahead"]["workers"], flush=True)
"""
    assert after_setup(script, before=before).split() == ["1", "0"]


FORKS = """
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
    assert ebb.stats()["ahead"]["workers"] == 1
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


@pytest.mark.sweep
def test_children_of_fork_have_workers_of_their_own():
    for _ in range(3):
        assert after_setup(FORKS) == "done\n"


@pytest.mark.parametrize("fork", ["os.fork()", "ctypes.PyDLL(None).fork()"])
def test_a_graph_that_is_being_replayed_at_a_fork_is_whole_in_both(fork):
    """Python, which has hooks of its own, need not be told of it."""
    script = f"""
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
    after_setup(script, before="import ctypes\n")


@pytest.mark.sweep
def test_threads_fork_while_others_train():
    script = """
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
    assert after_setup(script) == "True\n"
