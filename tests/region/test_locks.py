"""Each lock that Python may come to run under, held against the GIL: see Note [Locks and the GIL].

A deadlock cannot be caught in the process that has it, so each program runs in one of its own.
"""

from __future__ import annotations

import pytest

from ebb_tests.programs.ahead import in_a_process
from ebb_tests.time_limits import HANGS

COMMON = (
    f"HANGS = {HANGS}\n"
    + """
import faulthandler, sys, threading, time
import torch
import ebb
from ebb_tests.stand_ins import fake_accelerator

faulthandler.dump_traceback_later(HANGS, exit=True)
sys.setswitchinterval(1e-5)
held = threading.Event()


def inside(*_):  # called under the lock; needs the GIL
    held.set()
    time.sleep(0.002)  # whoever wants the lock comes by, with the GIL


def against(other):
    # Until `other` has met the lock while somebody inside was waiting for the GIL.
    def loop():
        while not done.is_set():
            held.wait(0.01)
            held.clear()
            other()

    done = threading.Event()
    thread = threading.Thread(target=loop)
    thread.start()
    return done, thread
"""
)

OFFLOADING = """
everything = ebb.Policy({"aten::*": ebb.OFFLOAD})

def step():
    x = torch.ones(256, requires_grad=True)
    with ebb.region(everything):
        y = x.sin().cos().exp()
    y.sum().backward()

ebb.config.offload.min_bytes = 0
with fake_accelerator() as fake:
    fake.on_device_allocation(inside)  # as an observer of a device that is out of memory
    done, thread = against(OTHER)
    for _ in range(100):
        step()
    done.set()
    thread.join()
    fake.on_device_allocation(None)
print("end")
"""

# What takes the lock of the engines with the GIL: bindings, and destructors that Python runs.
OTHERS = {
    "statistics": "lambda: ebb.stats()['offload']",
    "settings": "lambda: ebb.config.update(offload_min_bytes=0)",
    "a step": "step",
    "graphs that die": """lambda: dropped()

def dropped():
    x = torch.ones(256, requires_grad=True)
    with ebb.region(everything):
        y = x.sin().cos()
    del y
""",
}

REPLAYING = """
@torch.library.custom_op("ebb_test_locks::sine", mutates_args=())
def sine(x: torch.Tensor) -> torch.Tensor:
    inside()
    return x.sin()

sine.register_fake(torch.empty_like)
sine.register_autograd(
    lambda ctx, g: g * ctx.saved_tensors[0].cos(),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


class Saves(torch.autograd.Function):  # packs with the GIL
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g * ctx.saved_tensors[0]


again = ebb.Policy({"ebb_test_locks::sine": ebb.RECOMPUTE})
x = torch.ones(256, requires_grad=True)
for _ in range(20):
    with ebb.region(again):
        y = x * 2
        z = sine(sine(y)).exp().sum()
        backward = threading.Thread(target=z.backward)  # replays under the graph's lock
        backward.start()
        for _ in range(20):
            held.wait(0.01)
            held.clear()
            Saves.apply(y)
    backward.join()
print("end")
"""

PAGING = """
rows = torch.tensor(3)
def step():
    x = torch.ones(8, 16, requires_grad=True)
    with ebb.region(ebb.Policy({"aten::*": ebb.PAGE})):
        y = x * 2
        ebb.experimental.mark_rows(y, rows)
        z = y.sin().cos()
    z.sum().backward()
    ebb.experimental.paging.step_ok()

threads = [threading.Thread(target=lambda: [step() for _ in range(30)]) for _ in range(2)]
for thread in threads:
    thread.start()
while any(thread.is_alive() for thread in threads):
    ebb.stats()["paging"]
    ebb.stats()["offload"]
    ebb.stats()
print("end")
"""


DYING = """
import weakref
everything = ebb.Policy({"aten::*": ebb.OFFLOAD})
ended = []

def died():
    "Called by whoever drops the last reference to a storage. It waits for another thread."
    other = threading.Thread(target=ebb._C.offload_stats)
    other.start()
    other.join(10)
    ended.append(not other.is_alive())

def step():
    x = torch.ones(256, requires_grad=True)
    with ebb.region(everything):
        h = x
        for _ in range(4):
            h = h.sin()
            weakref.finalize(h.untyped_storage(), died)
    fake.advance(1000)
    h.sum().backward()

ebb.config.update(offload_min_bytes=0, offload_in_flight_bytes=2048)
with fake_accelerator() as fake:
    fake.on_device_allocation(lambda: ebb.stats()["offload"])  # has the lock, and takes it again
    while len(ended) < 40 and all(ended):
        step()
    fake.on_device_allocation(None)
assert all(ended)
print("end")
"""


DRAWING = """
from ebb import _testing

library = torch.library.Library("aten", "IMPL")

def bernoulli(x, *, generator=None):  # called under the lock of draws
    inside()
    return torch.ones_like(x)

library.impl("bernoulli", bernoulli, "CPU", allow_override=True)
x = torch.full((8,), 0.5)

def draws():
    with ebb.region():
        torch.bernoulli(x)

def draws_with_the_gil():
    with ebb.region():
        _testing.draw_with_the_gil()

done, thread = against(draws_with_the_gil)
for _ in range(100):
    draws()
done.set()
thread.join()
print("end")
"""


def assert_ends(program: str) -> None:
    done = in_a_process(COMMON + program, seconds=HANGS, OMP_NUM_THREADS="1")
    assert done.stdout == "end\n", done.stderr[-4000:]


@pytest.mark.parametrize("other", OTHERS)
def test_the_lock_of_the_offload_engines(other):
    body, _, functions = OTHERS[other].partition("\n\n")
    before, after = OFFLOADING.split("ebb.config.offload.min_bytes", 1)
    program = before + functions + "\nebb.config.offload.min_bytes" + after.replace("OTHER", body)
    assert_ends(program)


def test_no_storage_dies_under_the_lock_of_the_offload_engines():
    assert_ends(DYING)


def test_the_lock_of_draws():
    assert_ends(DRAWING)


@pytest.mark.sweep
def test_the_lock_of_a_graph():
    assert_ends(REPLAYING)


@pytest.mark.sweep
def test_the_lock_of_the_paging_engine():
    assert_ends(PAGING)
