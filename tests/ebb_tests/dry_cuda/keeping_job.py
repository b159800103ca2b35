"""A job whose regions keep what they can recompute: ``python keeping_job.py [before]``. A thread
beside the steps holds the GIL and waits for the allocator's lock. Prints a line of JSON."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch

import ebb
from ebb import _C

MIB = 1 << 20


def record_history() -> None:
    torch.cuda.memory._record_memory_history()


def trace_frees() -> None:
    from torch.cuda import _gpu_trace

    _gpu_trace.register_callback_for_memory_deallocation(lambda *_: _C.room_stats())
    torch._C._activate_gpu_trace()


def take_one_large_piece() -> torch.Tensor:
    return torch.empty(450 * MIB, dtype=torch.uint8, device="cuda")


BEFORE: dict[str, Callable[[], Any]] = {
    "nothing": lambda: None,
    "history": record_history,
    "trace": trace_frees,
    "large piece": take_one_large_piece,
}


def train(x: torch.Tensor) -> None:
    for _ in range(60):
        h = x
        for _ in range(8):
            with ebb.region(ebb.policies.recompute_all):
                h = h.sin().exp().cos()
        (h * 2).sum().backward()
        x.grad = None


def main(before: str = "nothing") -> None:
    held = BEFORE[before]()
    _C.keep_while_there_is_room(1 << 40)
    x = torch.randn(10 * MIB // 4, device="cuda", requires_grad=True)
    ends = threading.Event()

    def ask() -> None:
        while not ends.is_set():
            torch.cuda.memory_allocated()
            torch.empty(1000, device="cuda")

    asking = threading.Thread(target=ask)
    asking.start()
    out_of_memory = False
    try:
        train(x)
    except torch.OutOfMemoryError:
        out_of_memory = True
    ends.set()
    asking.join()
    del held
    print(json.dumps(_C.room_stats() | {"out_of_memory": out_of_memory}))


if __name__ == "__main__":
    main(*sys.argv[1:])
