"""Runs the body of a test on two gloo ranks.

Two processes serve all tests of a session, since each takes seconds to import torch. A test that
fails on a rank, or that takes too long, may leave the other one waiting for it: then both are
killed, and the next test gets two new ones.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import importlib
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import connection
from multiprocessing.connection import Connection
from typing import Any

RANKS = 2
# For one test, which takes one or two. A collective whose peer does not come fails after half.
SECONDS = 240


def on_two_ranks(test: Callable[..., None]) -> Callable[..., None]:
    """The test's arguments and its module must be known to other processes: no fixtures."""

    @functools.wraps(test)
    def on_both(**arguments: Any) -> None:
        failures = pair().run(test.__module__, test.__name__, arguments)
        assert not failures, "\n".join(failures)

    return on_both


@functools.cache
def pair() -> Pair:
    return Pair()


class Pair:
    """Two processes, started when they are first needed."""

    def __init__(self) -> None:
        self.pipes: list[Connection] = []
        self.processes: list[Any] = []

    def run(self, module: str, test: str, arguments: dict[str, Any]) -> list[str]:
        """What went wrong, for each rank that failed."""
        if not self.processes:
            self.start()
        for pipe in self.pipes:
            pipe.send((module, test, arguments))
        failures = self.failures()
        if failures:
            self.kill()
        return failures

    def failures(self) -> list[str]:
        deadline = time.monotonic() + SECONDS
        failures = []
        waiting = dict(zip(self.pipes, range(RANKS), strict=True))
        while waiting:
            ready = connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))
            for pipe in ready:
                rank = waiting.pop(pipe)
                try:
                    failure = pipe.recv()
                except EOFError:
                    failure = "its process ended"
                if failure is not None:
                    failures.append(f"rank {rank}: {failure}")
                    deadline = min(deadline, time.monotonic() + 1)  # its peer may wait for it
            if not ready:
                failures += [f"rank {rank} has not answered" for rank in waiting.values()]
                break
        return failures

    def start(self) -> None:
        spawn = multiprocessing.get_context("spawn")
        store = os.path.join(tempfile.mkdtemp(), "store")
        for rank in range(RANKS):
            here, there = spawn.Pipe()
            process = spawn.Process(target=serve, args=(rank, store, there, sys.path), daemon=True)
            process.start()
            there.close()
            self.pipes.append(here)
            self.processes.append(process)

    def kill(self) -> None:
        """No process ends by itself: FSDP2 on gloo sometimes aborts then."""
        for process, pipe in zip(self.processes, self.pipes, strict=True):
            process.kill()
            process.join()
            pipe.close()
        self.processes, self.pipes = [], []


def serve(rank: int, store: str, pipe: Connection, path: list[str]) -> None:
    """Runs tests and sends back what they raised, until it is killed or its parent ends."""
    sys.path[:] = path
    os.environ |= {"OMP_NUM_THREADS": "1", "RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=SECONDS / 2),
    )
    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            pipe.send(failure_of(*pipe.recv()))
    os._exit(0)


def failure_of(module: str, test: str, arguments: dict[str, Any]) -> str | None:
    import torch
    import torch.distributed as dist

    import ebb

    groups = set(dist.distributed_c10d._world.pg_map)
    faulthandler.dump_traceback_later(SECONDS - 5)
    try:
        torch.manual_seed(0)
        ebb.reset_stats()
        importlib.import_module(module).__dict__[test].__wrapped__(**arguments)
        assert ebb.stats()["open_regions"] == 0, "a region is left open"
        for group in set(dist.distributed_c10d._world.pg_map) - groups:
            dist.destroy_process_group(group)  # its threads poll a hundred times a second
    except BaseException:
        return traceback.format_exc()
    finally:
        faulthandler.cancel_dump_traceback_later()
    return None
