"""Replays ahead of backward: settings, delays and the wait for their end."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import ebb
from ebb import _C, _testing


@contextlib.contextmanager
def replays_ahead(regions: int = 1, limit: int | str = "1GiB") -> Iterator[None]:
    """Enables replays ahead. Waits for them at the end."""
    with ebb.config.patch(ahead_regions=regions, ahead_limit=limit):
        yield
        wait_for_replays()


def wait_for_replays() -> None:
    """Waits until no more replays can run ahead for now."""
    if "ahead" not in _C.plugins:
        return
    until = time.monotonic() + 60
    while not _testing.replays_ahead_are_idle():
        assert time.monotonic() < until
        time.sleep(0.0005)


@contextlib.contextmanager
def delays(microseconds: int) -> Iterator[None]:
    """The worker sleeps before each replay, for a random time up to `microseconds`."""
    _testing.delay_replays_ahead(microseconds)
    try:
        yield
    finally:
        _testing.delay_replays_ahead(0)
