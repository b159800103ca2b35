"""How fast bytes leave memory and come back, measured."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ebb import _C, offload
from ebb._plan.transfers import Link
from ebb._policy.decision import OFFLOAD
from ebb._policy.policy import Policy
from ebb._region.region import region
from ebb._support import devices
from ebb._support.log import log

# Bytes of one copy, of which five are there at a time. On an accelerator what the host does for a
# copy takes as long as a few MiB do; where the large probe has no room the small one is taken.
_PROBE, _ACCELERATOR_PROBE = 8 * 2**20, 64 * 2**20
_ROUNDS = 3
_MOST_SECONDS = 60.0  # for one copy


def measure_link(device: torch.device) -> Link | None:
    """Copies some bytes out and back.

    Args:
        device: whose memory they leave.

    Returns:
        None if nothing can leave: on a CPU without a disk tier, without host memory for it, or if
        the copies failed.
    """
    settings = offload.configure()
    if not may_send(device):
        return None
    room = settings["pinned_limit"] + (settings["disk_limit"] if settings["disk"] else 0)
    probes = [_PROBE] if device.type == "cpu" else [_ACCELERATOR_PROBE, _PROBE]
    for size in (max(probe, settings["min_bytes"]) for probe in probes):
        rounds = _rounds(device, size) if size <= room else []
        if rounds:
            out, back = (min(times) for times in zip(*rounds, strict=True))
            return Link(size / out, size / back, max(1, settings["min_bytes"]), room)
    return None


def _rounds(device: torch.device, size: int) -> list[tuple[float, float]]:
    """Times of the rounds in which all bytes left the device."""
    try:
        with transfers_of(in_flight_bytes=0, prefetch_bytes=0):
            rounds = [_round(device, size) for _ in range(_ROUNDS)]
    except RuntimeError as error:  # no memory for the probe, among others
        log.info("plans: copies of %d bytes were not measured, since one failed: %s", size, error)
        return []
    return [one for one in rounds if one is not None]


def may_send(device: torch.device) -> bool:
    """Whether values of a device may leave it, to the host or, from a CPU, to a disk."""
    settings = offload.configure()
    return bool(settings["disk"]) or device.type not in ("cpu", "meta")


@contextmanager
def transfers_of(**settings: Any) -> Iterator[None]:
    """OFFLOAD has these settings meanwhile."""
    before = offload.configure()
    offload.configure(keep_last=0, **settings)
    try:
        yield
    finally:
        offload.configure(**before)


def _round(device: torch.device, size: int) -> tuple[float, float] | None:
    """Milliseconds out and back; None if nothing left."""
    x = torch.ones(size // 4, device=device, requires_grad=True)
    gradient = torch.ones_like(x)
    sent = _C.offload_stats()["bytes_sent"]

    def forward() -> torch.Tensor:
        with region(Policy(default=OFFLOAD), name="ebb.plan measures copies"):
            return (x * 2).sin()

    y, out = _timed(forward)
    if _C.offload_stats()["bytes_sent"] < sent + size:
        return None
    _, back = _timed(lambda: torch.autograd.grad(y, x, gradient))
    return out, back


def _timed(function: Callable[[], Any]) -> tuple[Any, float]:
    devices.wait()
    begin = time.perf_counter()
    result = function()
    devices.wait()
    while _C.offload_stats()["in_flight_bytes"] and time.perf_counter() - begin < _MOST_SECONDS:
        time.sleep(1e-4)
    return result, (time.perf_counter() - begin) * 1e3
