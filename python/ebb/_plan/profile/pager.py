"""Paging in measured steps. In: a profile, and calls of `run_step`. Out: a `Pager`."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

import torch

from ebb._config import config
from ebb._plan.profile.profile import Profile, Value
from ebb._support import devices
from ebb.experimental.paging._steps import marks, runs

_PROBE = 4 * 2**20  # bytes of one timed copy
_ROUNDS = 5
_EACH = 0.01  # host milliseconds for one storage, out and back


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
"""In place of a pager where nothing is paged."""


def has_rows(value: Value) -> bool:
    """True if the value can go to a pool."""
    return value.live_rows > 0 and value.rows > 0 and not value.rows_mixed


class RunStepMonitor:
    """Checks that measured steps use paging.run_step. Other steps cannot run again after an
    overflow, so a plan must not page in them."""

    def __init__(self) -> None:
        self._before = Counter(runs)
        self._marks_before = Counter(marks)
        self._speed: float | None = None  # measured once

    def pager(self, profile: Profile, device: torch.device) -> Pager | None:
        """The pager for a step that ran since this object was made. None if no value has rows, or
        some were marked outside of :func:`ebb.experimental.paging.run_step`."""
        since, marked = Counter(runs) - self._before, Counter(marks) - self._marks_before
        if not since or marked[False] or not any(map(has_rows, profile.values)):
            return None
        settings = config.paging
        if self._speed is None:
            self._speed = _copy_speed(device)
        return Pager(
            self._speed,
            page_rows=settings.page_rows,
            headroom=settings.headroom,
            limit=math.inf if settings.device_limit is None else settings.device_limit,
            beside=device.type != "cpu",
            fixed_order=since[True] > 0,
        )


def _copy_speed(device: torch.device) -> float:
    """Bytes that a copy moves in a millisecond."""
    x = torch.zeros(_PROBE, dtype=torch.uint8, device=device)
    y = torch.empty_like(x)
    times = [devices.timed(lambda: y.copy_(x)) for _ in range(_ROUNDS)]
    return _PROBE / max(min(times), 1e-6)


def live_bytes(value: Value) -> int:
    """Bytes of the valid rows."""
    return value.live_rows * (value.memory // value.rows)
