"""Runs a program on two ranks, each in a process of its own that may fail."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import torch.distributed as dist

from ebb_tests import fork_server

HANGS = 100  # seconds


@functools.cache
def servers() -> list[fork_server.Server]:
    return [fork_server.server(), fork_server.Server()]


def run_on_ranks(
    *arguments: str, has_agent: bool = True, attempt: int = 0, **environment: str
) -> list[tuple[subprocess.CompletedProcess[str], float]]:
    """Runs Python with these arguments on both ranks, as torchrun does.

    Args:
        has_agent: this process has the store, as torchrun's agent; otherwise rank 0 has it.
        attempt: number of restarts.

    Returns:
        For each rank, what it printed and its status; and when it ended, by `time.monotonic()`.
    """
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    env = os.environ | environment
    env |= {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([os.environ.get("PYTHONPATH", ""), *sys.path]),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "TORCHELASTIC_RESTART_COUNT": str(attempt),
    }
    if has_agent:
        env["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    else:
        del store  # rank 0 gets its port

    def run(rank: int) -> tuple[subprocess.CompletedProcess[str], float]:
        own = env | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        return servers()[rank].run([*arguments], own, os.getcwd(), None, HANGS), time.monotonic()

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(run, range(2)))
