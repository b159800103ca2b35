"""Bytes of memory over time. In: allocations and frees. Out: curves and peaks."""

from __future__ import annotations

from collections.abc import Iterable

import torch

Span = tuple[float, float]
"""The begin and the end of an interval, in milliseconds."""


class Changes:
    """Allocations and frees over time: pairs of time and bytes, which are negative for a free."""

    def __init__(self, changes: Iterable[tuple[float, int]]) -> None:
        changes = list(changes)
        self.allocated = _times_and_bytes([change for change in changes if change[1] > 0])
        self.freed = _times_and_bytes([change for change in changes if change[1] < 0])

    def at(self, time: float) -> int:
        """Bytes that are allocated at the time `time`."""
        parts = (self.allocated, self.freed)
        return sum(int(sizes[times <= time].sum()) for times, sizes in parts)


def _times_and_bytes(changes: list[tuple[float, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    times = torch.tensor([time for time, _ in changes], dtype=torch.float64, device="cpu")
    sizes = torch.tensor([size for _, size in changes], dtype=torch.int64, device="cpu")
    return times, sizes


def during(begin: float, end: float, size: int) -> list[tuple[float, int]]:
    """The two changes of memory that is allocated for a time."""
    return [(begin, size), (end, -size)]


def union(spans: Iterable[Span]) -> list[Span]:
    """Join spans of time that overlap or touch."""
    joined: list[Span] = []
    for begin, end in sorted(spans):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((begin, end))
    return joined


def curve(all_changes: Iterable[Changes]) -> tuple[torch.Tensor, torch.Tensor]:
    """Times, and the bytes allocated from each time on. At equal times, frees come first."""
    all_changes = list(all_changes)
    parts = [changes.freed for changes in all_changes]
    parts += [changes.allocated for changes in all_changes]
    times, order = torch.sort(torch.cat([times for times, _ in parts]), stable=True)
    return times, torch.cat([sizes for _, sizes in parts])[order].cumsum(0)


def highest(all_changes: Iterable[Changes]) -> tuple[int, float]:
    """The peak in bytes, and its time."""
    times, sizes = curve(all_changes)
    if times.numel() == 0:
        return 0, 0.0
    index = int(sizes.argmax())
    return max(0, int(sizes[index])), float(times[index])
