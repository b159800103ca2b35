"""The speed of OFFLOAD and PAGE. In: a device, and calls of `run_step`. Out: `Link`, `Pager`."""

from __future__ import annotations

import functools
import math
import sys
import time
from collections import Counter
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from ebb import _C
from ebb._config import config
from ebb._plan.profile.profile import Profile, Value
from ebb._policy.decision import OFFLOAD
from ebb._policy.policy import Policy
from ebb._region.region import region
from ebb._support import devices
from ebb._support.log import log
from ebb.experimental.paging._steps import marks, runs

# Bytes of a probe, the storage that is copied to measure the speed. On an accelerator ebb measures
# before it knows how much memory is free, so the probe is small, and several copies in a row hide
# the host's work for each. On a CPU ebb measures with a region, which needs five times as much
# memory.
_PROBE = 8 * 2**20
_COPIES = 8
_ROUNDS = 3
_MOST_SECONDS = 60.0  # timeout for one copy
_PAGED_PROBE, _PAGED_ROUNDS = 4 * 2**20, 5  # the same for PAGE
_EACH = 0.01  # host milliseconds to page one storage, out and back


@dataclass(frozen=True)
class Link:
    """Speed and limits of offloading."""

    out: float  # bytes per millisecond
    back: float
    least: int  # smaller storages are not offloaded
    room: int  # bytes that may be offloaded at a time
    is_disk: bool = False  # True: the host sees when a copy is done, and releases memory then


NO_LINK = Link(1.0, 1.0, sys.maxsize, 0)
"""A link over which nothing is offloaded."""


def measure_link(device: torch.device) -> Link | None:
    """Measure the speed of copies from a device and back. None if nothing can be offloaded: on a
    CPU without a disk tier, without host memory for the probe, or if the copies failed."""
    settings = config.offload
    if not may_send(device):
        return None
    room = settings.pinned_limit + (settings.disk_limit if settings.disk else 0)
    size = _PROBE if device.type != "cpu" else max(_PROBE, settings.min_bytes)
    rounds = _rounds(device, size) if size <= room else []
    if not rounds:
        return None
    out, back = (min(times) for times in zip(*rounds, strict=True))
    least = max(1, settings.min_bytes)
    return Link(size / out, size / back, least, room, is_disk=device.type == "cpu")


def _rounds(device: torch.device, size: int) -> list[tuple[float, float]]:
    """Milliseconds to offload and to fetch, for each round in which all bytes were offloaded."""
    try:
        if device.type != "cpu":
            return _rounds_of_copies(device, size)
        with transfers_of(window=0):
            rounds = [_round(size) for _ in range(_ROUNDS)]
    except RuntimeError as error:  # such as no memory for the probe
        log.info("plan: could not time OFFLOAD copies of %d bytes: %s", size, error)
        return []
    return [times for times in rounds if times is not None]


def _rounds_of_copies(device: torch.device, size: int) -> list[tuple[float, float]]:
    there = torch.empty(size, dtype=torch.uint8, device=device)
    here = torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def time_of(target: torch.Tensor, source: torch.Tensor) -> float:
        def copy() -> None:
            for _ in range(_COPIES):
                target.copy_(source, non_blocking=True)

        return devices.timed(copy) / _COPIES

    return [(time_of(here, there), time_of(there, here)) for _ in range(_ROUNDS)]


def may_send(device: torch.device) -> bool:
    """True if values can be offloaded from a device: to the host or, from a CPU, to a disk."""
    return bool(config.offload.disk) or device.type not in ("cpu", "meta")


def transfers_of(window: int) -> AbstractContextManager[Any]:
    """Settings of OFFLOAD inside the context. `window`: bytes that may be in flight, and bytes that
    may be prefetched."""
    return config.patch(
        offload_keep_last=0, offload_in_flight_bytes=window, offload_prefetch_bytes=window
    )


def _round(size: int) -> tuple[float, float] | None:
    """Milliseconds to offload from the CPU and to fetch; None if the probe was not offloaded."""
    x = torch.ones(size // 4, device="cpu", requires_grad=True)
    gradient = torch.ones_like(x)
    sent = _C.offload_stats()["bytes_sent"]
    begin = time.perf_counter()
    with region(Policy(default=OFFLOAD), name="ebb.plan measures copies"):
        y = (x * 2).sin()
    offloaded = _end_of_copies()
    if _C.offload_stats()["bytes_sent"] < sent + size:
        return None
    torch.autograd.grad(y, x, gradient)
    return (offloaded - begin) * 1e3, (_end_of_copies() - offloaded) * 1e3


def _end_of_copies() -> float:
    limit = time.perf_counter() + _MOST_SECONDS
    while _C.offload_stats()["in_flight_bytes"] and time.perf_counter() < limit:
        time.sleep(1e-4)
    return time.perf_counter()


@dataclass(frozen=True)
class Pager:
    """Settings and speed of paging."""

    speed: float  # bytes that one copy moves in a millisecond
    page_rows: int = 64  # as in ebb.config.paging
    headroom: float = 1.1
    limit: float = math.inf  # maximum bytes of all pools
    # True if copies run on a stream of ebb's own. Then a paged storage stays in memory until the
    # next region pages something.
    beside: bool = False
    # As in ebb.experimental.paging.step: a layer whose backward directly follows its forward is
    # not paged.
    fixed_order: bool = False

    def pages(self, rows: int) -> int:
        return -(-rows // self.page_rows)

    def size_of(self, value: Value) -> int:
        """Bytes that the rows of a value take in a pool."""
        rows = min(self.pages(value.live_rows) * self.page_rows, value.rows)
        return int(rows * self.headroom) * (value.memory // value.rows)

    def time_of(self, value: Value) -> float:
        """Milliseconds to copy a value out and back."""
        return _EACH + (live_bytes(value) + value.memory) / self.speed


NO_PAGER = Pager(speed=1.0)
"""A pager with which nothing is paged."""


def has_rows(value: Value) -> bool:
    """True if the value can go to a pool."""
    return value.live_rows > 0 and value.rows > 0 and not value.rows_mixed


def counts_of_steps() -> tuple[Counter[bool], Counter[bool]]:
    """Calls of `run_step` and of `mark_rows` so far, by the keys of `runs` and `marks`."""
    return Counter(runs), Counter(marks)


def pager_of(
    profile: Profile, device: torch.device, before: tuple[Counter[bool], Counter[bool]]
) -> Pager | None:
    """The pager for a step that ran since `before`, a result of `counts_of_steps`. None if no value
    has rows, or some were marked outside of ``ebb.experimental.paging.run_step``: such a step
    cannot run again after an overflow, so a plan must not page in it."""
    since, marked = (now - then for now, then in zip(counts_of_steps(), before, strict=True))
    if not since or marked[False] or not any(map(has_rows, profile.values)):
        return None
    settings = config.paging
    return Pager(
        _copy_speed(device),
        page_rows=settings.page_rows,
        headroom=settings.headroom,
        limit=math.inf if settings.device_limit is None else settings.device_limit,
        beside=device.type != "cpu",
        fixed_order=since[True] > 0,
    )


@functools.cache
def _copy_speed(device: torch.device) -> float:
    """Bytes that a copy moves in a millisecond."""
    x = torch.zeros(_PAGED_PROBE, dtype=torch.uint8, device=device)
    y = torch.empty_like(x)
    times = [devices.timed(lambda: y.copy_(x)) for _ in range(_PAGED_ROUNDS)]
    return _PAGED_PROBE / max(min(times), 1e-6)


def live_bytes(value: Value) -> int:
    """Bytes of the valid rows."""
    return value.live_rows * (value.memory // value.rows)
