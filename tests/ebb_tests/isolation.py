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

MEMORY = 6 << 30  # bytes of address space that a child may add to its parent's

Progress = Callable[[int], None]  # called with the number of the next attempt


def each_isolated(
    jobs: Iterable[Any],
    work: Callable[[Any, Progress, frozenset[int]], Any],
    *,
    seconds: float = 5,
    crashes: int = 8,
) -> Iterator[tuple[Any, Any, list[str]]]:
    """Yields each job, its result, and a message for each attempt that ended a child process.

    Args:
        work: does a job. Its arguments: the job; a function to call with the number of each attempt
            before the attempt; and the numbers of attempts to skip, since they crashed.
        seconds: processor time that an attempt may take. Its wall time may be 100 times as long.
        crashes: a job with so many crashed attempts is abandoned, and its result is None.
    """
    waiting = list(jobs)[::-1]
    crashed: dict[int, tuple[set[int], list[str]]] = {}
    attempt = mmap.mmap(-1, 8)
    while waiting:
        for result in one_child(waiting, work, crashed, attempt, seconds):
            yield waiting.pop(), result, crashed.pop(len(waiting), (set(), []))[1]
        if waiting:  # the last of these jobs ended the child
            number = struct.unpack("q", attempt[:8])[0]
            skipped, ends = crashed.setdefault(len(waiting) - 1, (set(), []))
            skipped.add(number)
            ends.append(f"attempt {number}: {one_child.end}")
            if len(skipped) >= crashes:
                crashed.pop(len(waiting) - 1)
                yield waiting.pop(), None, ends


def one_child(waiting, work, crashed, attempt, seconds) -> Iterator[Any]:
    """Yields results of a child that does `waiting` from the end, until the child ends."""
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
    """A start time in the processor time of a process, and in wall time."""

    def __init__(self, pid: int) -> None:
        # The clock of clock_getcpuclockid(pid), a function that Python lacks.
        self._processor = ~pid << 3 | 2
        self._used = time.clock_gettime(self._processor)
        self._wall = time.monotonic()

    def is_past(self, seconds: float) -> bool:
        """True after `seconds` of processor time, or 100 times as much wall time."""
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
