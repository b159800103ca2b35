"""Bytes of memory over time."""

from __future__ import annotations

from collections.abc import Iterable

import torch


class Changes:
    """Allocations and frees over time.

    Args:
        changes: times and bytes; bytes are negative for a free.
    """

    def __init__(self, changes: Iterable[tuple[float, int]]) -> None:
        found = list(changes)
        self.taken = _times_and_bytes([one for one in found if one[1] > 0])
        self.given_back = _times_and_bytes([one for one in found if one[1] < 0])

    def at(self, time: float) -> int:
        """Bytes that are allocated at a time."""
        parts = (self.taken, self.given_back)
        return sum(int(sizes[times <= time].sum()) for times, sizes in parts)


def _times_and_bytes(changes: list[tuple[float, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    times = torch.tensor([time for time, _ in changes], dtype=torch.float64, device="cpu")
    sizes = torch.tensor([size for _, size in changes], dtype=torch.int64, device="cpu")
    return times, sizes


def union(stretches: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Join stretches of time that overlap or touch."""
    joined: list[tuple[float, float]] = []
    for begin, end in sorted(stretches):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((begin, end))
    return joined


def curve(all_changes: Iterable[Changes]) -> tuple[torch.Tensor, torch.Tensor]:
    """Times, and the bytes allocated from each time on. At equal times, frees come first."""
    found = list(all_changes)
    parts = [*(one.given_back for one in found), *(one.taken for one in found)]
    times, order = torch.sort(torch.cat([times for times, _ in parts]), stable=True)
    return times, torch.cat([sizes for _, sizes in parts])[order].cumsum(0)


def highest(all_changes: Iterable[Changes]) -> tuple[int, float]:
    """The peak in bytes, and its time."""
    times, now = curve(all_changes)
    if times.numel() == 0:
        return 0, 0.0
    place = int(now.argmax())
    return max(0, int(now[place])), float(times[place])
