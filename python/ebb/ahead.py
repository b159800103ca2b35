"""Replays that run before backward asks: on a thread of their own, while backward works.

>>> settings = ebb.ahead.configure(regions=1, limit="1GiB")
"""

from __future__ import annotations

import atexit
import os
from typing import Any

from ebb import _C
from ebb._region import commotion
from ebb._support.old import warn_of_old
from ebb._support.shown import shown
from ebb._support.sizes import Bytes, number_of_bytes, whole_number

__all__ = ["configure"]


def configure(
    *,
    regions: int | None = None,
    limit: Bytes | None = None,
    busy_cores: bool | None = None,
    side_stream: bool | None = None,
) -> dict[str, Any]:
    """Set how far replays run ahead of backward, for the whole process, from the next region on.

    While backward works on one outermost region, another thread replays the one that comes next.
    What autograd saves in the last region is not given up at all, so that backward finds it there.
    Both cost memory, at most ``limit``, and no exactness. What is not given stays as it is.
    ``EBB_AHEAD`` in the environment sets the number of regions, or the limit; ``auto`` is 1.

    Args:
        regions: how many outermost regions ahead of backward. 0, the default: off.
        limit: the most bytes, in the whole process, that are there before backward needs them: a
            number, or text such as ``"512MiB"``. A region that is larger is replayed in part.
            Default 1 GiB.
        busy_cores: replay ahead on the CPU also where no core is idle. By default replays run
            ahead there only if the process has two cores for each of
            ``torch.get_num_threads()``, or if a backward without replays ahead left a core idle.
        side_stream: on a device, replay on a stream beside backward's, which hides the kernels'
            time; else on backward's own, which hides the host's. Default False.

    Returns:
        All settings by name, as they are now; sizes in bytes.

    Raises:
        TypeError: a setting has the wrong type.
        ValueError: a setting is negative, too large, or text that is no size.
    """
    changed: dict[str, Any] = {}
    if regions is not None:
        changed["regions"] = whole_number("regions", regions, "regions")
    if limit is not None:
        changed["limit"] = number_of_bytes("limit", limit)
    switches = {"busy_cores": busy_cores, "side_stream": side_stream}
    for name, value in switches.items():
        if value is not None:
            if not isinstance(value, bool):
                raise TypeError(f"ebb: {name} must be a bool; got {shown(value)}")
            changed[name] = value
    if changed.get("regions"):
        commotion.install()
    _C.configure_ahead(_C.ahead_settings() | changed)
    return _C.ahead_settings()


def settings() -> dict[str, Any]:
    """Deprecated: :func:`configure` returns the settings."""
    warn_of_old("ebb.ahead.settings()", "ebb.ahead.configure()")
    return configure()


def stats() -> dict[str, int]:
    """Deprecated: see :func:`ebb.stats`."""
    warn_of_old("ebb.ahead.stats()", 'ebb.stats()["ahead"]')
    return _C.ahead_stats()


# While the interpreter is there: a replay may come to need it.
atexit.register(_C.end_ahead)
# Before Python takes locks for it: to end a worker the GIL is given up.
os.register_at_fork(before=_C.stop_ahead)
