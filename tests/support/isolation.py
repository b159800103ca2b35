"""Running many small jobs in forked children, since a job may crash its process or never end."""

from __future__ import annotations

import faulthandler
import mmap
import os
import pickle
import resource
import select
import signal
import struct
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

MEMORY = 6 << 30  # bytes of address space beyond what the parent has

Progress = Callable[[int], None]  # told the number of the attempt that comes next


def each_isolated(
    jobs: Iterable[Any],
    work: Callable[[Any, Progress, frozenset[int]], Any],
    *,
    seconds: float = 5,
    crashes: int = 8,
) -> Iterator[tuple[Any, Any, list[str]]]:
    """Yields each job with what `work` made of it, and how its attempts ended that ended a child.

    Args:
        work: gets a job, a function to be told the number of each attempt before it is made, and
            the numbers of those that have crashed, which it leaves out.
        seconds: of the processor's time that one attempt may take; of waiting, a hundred times as
            many.
        crashes: after so many a job is given up; its result is None.
    """
    waiting = list(jobs)[::-1]
    crashed: dict[int, tuple[set[int], list[str]]] = {}
    attempt = mmap.mmap(-1, 8)
    while waiting:
        for result in one_child(waiting, work, crashed, attempt, seconds):
            yield waiting.pop(), result, crashed.pop(len(waiting), (set(), []))[1]
        if waiting:  # the child died of this job
            number = struct.unpack("q", attempt[:8])[0]
            skipped, ends = crashed.setdefault(len(waiting) - 1, (set(), []))
            skipped.add(number)
            ends.append(f"attempt {number}: {one_child.end}")
            if len(skipped) >= crashes:
                crashed.pop(len(waiting) - 1)
                yield waiting.pop(), None, ends


def one_child(waiting, work, crashed, attempt, seconds) -> Iterator[Any]:
    """The results of a child that does the jobs from the last, until it dies."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        do_jobs(write, waiting, work, crashed, attempt)
    os.close(write)
    with os.fdopen(read, "rb") as stream:
        began = Moment(pid)
        seen, killed = None, False
        while True:
            if not select.select([stream], [], [], 0.2)[0] and not killed:
                now = attempt[:8]
                if now != seen:
                    seen, began = now, Moment(pid)
                elif began.is_past(seconds):
                    os.kill(pid, signal.SIGKILL)
                    killed = True
                continue
            header = stream.read(8)
            if len(header) < 8:
                break
            began = Moment(pid)
            yield pickle.loads(stream.read(struct.unpack("q", header)[0]))
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    one_child.end = (
        f"no end in {seconds:g} s" if killed else
        signal.Signals(-status).name if status < 0 else f"exit status {status}"
    )  # fmt: skip


class Moment:
    """A moment in the life of a process, which may have to wait for the processor."""

    def __init__(self, pid: int) -> None:
        # As clock_getcpuclockid makes it, of which Python knows nothing.
        self._processor = ~pid << 3 | 2
        self._used = time.clock_gettime(self._processor)
        self._wall = time.monotonic()

    def is_past(self, seconds: float) -> bool:
        """Whether the process used that long since, or a hundred times that long went by."""
        used = time.clock_gettime(self._processor) - self._used
        return used > seconds or time.monotonic() - self._wall > 100 * seconds


def do_jobs(write, waiting, work, crashed, attempt) -> None:
    used = int(open("/proc/self/statm").read().split()[0]) * mmap.PAGESIZE  # noqa: SIM115
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    faulthandler.disable()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)

    def tell(number: int) -> None:
        attempt[:8] = struct.pack("q", number)

    status = 1
    try:
        with os.fdopen(write, "wb") as stream:
            for place in range(len(waiting) - 1, -1, -1):
                tell(-1)
                skipped = frozenset(crashed.get(place, (set(), []))[0])
                data = pickle.dumps(work(waiting[place], tell, skipped))
                stream.write(struct.pack("q", len(data)) + data)
                stream.flush()
        status = 0
    finally:
        os._exit(status)
