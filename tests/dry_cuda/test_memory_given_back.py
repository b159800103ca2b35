"""Memory that ebb gives back inside torch's CUDA allocator: see Note [Memory given back]."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import dry_cuda
import pytest

MIB = 1 << 20

# Beside the steps, a thread holds the GIL and waits for the allocator's lock.
JOB = """
import json, threading
import torch
import ebb
from ebb import _C

{before}
_C.keep_while_there_is_room(1 << 40)
x = torch.randn({bytes} // 4, device="cuda", requires_grad=True)
ends = threading.Event()

def ask():
    while not ends.is_set():
        torch.cuda.memory_allocated()
        torch.empty(1000, device="cuda")

asking = threading.Thread(target=ask)
asking.start()
out_of_memory = False
try:
    for _ in range(60):
        h = x
        for _ in range(8):
            with ebb.region(ebb.policies.recompute_all):
                h = h.sin().exp().cos()
        (h * 2).sum().backward()
        x.grad = None
except torch.OutOfMemoryError:
    out_of_memory = True
ends.set()
asking.join()
print(json.dumps(_C.room_stats() | {{"out_of_memory": out_of_memory}}))
"""
HISTORY = "torch.cuda.memory._record_memory_history()"
TRACE = """
import torch.cuda._gpu_trace as trace
import torch._C
trace.register_callback_for_memory_deallocation(lambda *_: _C.room_stats())
torch._C._activate_gpu_trace()
"""
ONE_LARGE_PIECE = "weights = torch.empty(450 << 20, dtype=torch.uint8, device='cuda')"


def run(memory: int, before: str = "", tensor: int = 10 * MIB) -> dict[str, int]:
    environment = os.environ | dry_cuda.environment(memory=memory)
    code = JOB.format(before=before, bytes=tensor)
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, int] = json.loads(done.stdout)
    return found


def test_steps_end_because_memory_is_given_back():
    found = run(200 * MIB)

    assert found["shortages"] > 0
    assert not found["out_of_memory"]


@pytest.mark.parametrize("before", [HISTORY, TRACE], ids=["history", "trace"])
def test_nothing_is_given_back_while_torch_calls_python_for_each_free(before):
    """A free in the allocator would wait for the GIL, which waits for the allocator."""
    found = run(200 * MIB, before)

    assert found["shortages"] == 0
    assert found["out_of_memory"]


def test_one_large_early_piece_lets_regions_keep_what_fits():
    assert run(1000 * MIB, ONE_LARGE_PIECE)["shortages"] == 0
