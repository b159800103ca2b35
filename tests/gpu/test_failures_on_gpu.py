"""What goes wrong on a device ends in a Python exception, and not with the process."""

from __future__ import annotations

import pytest

from ebb_tests.gpus import (
    ASSERTS_ON_DEVICE,
    NEEDS_GPU,
    RUNS_PAGE_KERNELS,
    assert_ended_well,
    run_in_a_process,
)

pytestmark = NEEDS_GPU

# Steps of each kind, each compared with eager's. `bad()` gives the device an index that is out of
# range, which ends everything that runs there.
PROGRAM = """
import gc, os, sys
import torch, ebb
from ebb_tests.gpus import MIB, OFFLOAD_ALL, PAGE_ALL, chain, leaf
ebb.config.update(offload_min_bytes=0, offload_in_flight_bytes=8 * MIB)
count = torch.tensor(300, device="cuda")

def recomputed(x):
    return torch.nn.functional.dropout(chain(x), 0.3)

def paged(x):
    return chain(ebb.experimental.mark_rows(x.view(512, -1) * 1.5, count) if ebb._C.in_region() else
                 x.view(512, -1) * 1.5)[:300]

KINDS = {
    "recompute": (recomputed, lambda: ebb.region()),
    "offload": (chain, lambda: ebb.region(OFFLOAD_ALL)),
    "page": (paged, lambda: ebb.region(PAGE_ALL)),
}

def forward(program, region, x):
    torch.manual_seed(0)
    with region():
        return program(x).sum()

def check(kind, x):
    program, region = KINDS[kind]
    expected = torch.autograd.grad(forward(program, torch.enable_grad, x), x)[0]
    for _ in range(3):
        assert torch.equal(torch.autograd.grad(forward(program, region, x), x)[0], expected)

def bad():
    return torch.zeros(4, device="cuda")[torch.tensor([1 << 20], device="cuda")]
"""

WITHOUT_A_FAILURE = """
x = leaf()
for kind in KINDS:
    check(kind, x)
assert ebb.experimental.paging.step_ok()
"""


@RUNS_PAGE_KERNELS
def test_steps_are_right_where_launches_block():
    code = PROGRAM + WITHOUT_A_FAILURE
    assert_ended_well(run_in_a_process(code, CUDA_LAUNCH_BLOCKING="1"))


# Ends without torch's own clean-up, which is not what is tested.
WITH_A_FAILURE = """
kind, place = sys.argv_
program, region = KINDS[kind]
x = leaf()
check(kind, x)
loss = forward(program, region, x)
try:
    if place == "in the region":
        with region():
            loss = program(x).sum() + bad().sum()
    else:
        bad()
    torch.autograd.grad(loss, x)
    torch.cuda.synchronize()
except RuntimeError as error:
    told = str(error)
    assert "device-side assert" in told or "CUDA error" in told, told
    print("raised")
del loss
gc.collect()
for ask in (ebb.stats, ebb._C.offload_stats, ebb._C.paging_stats):
    try:
        ask()
    except RuntimeError:
        pass
print("alive", flush=True)
os._exit(0)
"""


@ASSERTS_ON_DEVICE
@pytest.mark.parametrize("blocking", ["0", "1"])
@pytest.mark.parametrize("place", ["in the region", "before backward"])
@pytest.mark.parametrize("kind", ["recompute", "offload", "page"])
def test_a_device_assert_is_an_exception(kind, place, blocking):
    code = PROGRAM + WITH_A_FAILURE.replace("sys.argv_", repr((kind, place)))

    done = run_in_a_process(code, CUDA_LAUNCH_BLOCKING=blocking)

    assert_ended_well(done)
    assert done.stdout.split()[-2:] == ["raised", "alive"], done.stdout + done.stderr[-2000:]


OVERFLOW = """
ebb.config.paging.overflow = "assert"
program, region = KINDS["page"]
x = leaf()
count.fill_(10)
torch.autograd.grad(forward(lambda x: program(x)[:10], region, x), x)
count.fill_(512)
loss = None
try:
    loss = forward(program, region, x)
    torch.autograd.grad(loss, x)
    torch.cuda.synchronize()
except RuntimeError:
    print("raised")
del loss
gc.collect()
print("alive", flush=True)
os._exit(0)
"""


@ASSERTS_ON_DEVICE
def test_an_overflow_that_asserts_is_an_exception():
    done = run_in_a_process(PROGRAM.replace("STATIC", "False") + OVERFLOW)

    assert_ended_well(done)
    assert done.stdout.split()[-2:] == ["raised", "alive"], done.stdout + done.stderr[-2000:]
