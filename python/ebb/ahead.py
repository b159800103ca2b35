"""Replays ahead: another thread recomputes values before backward needs them.

>>> settings = ebb.ahead.configure(regions=1, limit="1GiB")
"""

from __future__ import annotations

import atexit
import functools
import os
from typing import Any

from ebb import _C
from ebb._region import global_state_guard
from ebb._support import deferred
from ebb._support.sizes import Bytes, Checks, checked, number_of_bytes, whole_number

__all__ = ["configure"]

_CHECKS: Checks = {
    "regions": functools.partial(whole_number, unit="regions"),
    "limit": number_of_bytes,
}


def configure(
    *,
    regions: int | None = None,
    limit: Bytes | None = None,
) -> dict[str, Any]:
    """Set how far replays run ahead of backward, for the whole process, from the next region on.

    While backward works on one outermost region, another thread replays the next one. The tensors
    that autograd saves in the last region are not freed, so backward need not recompute them. Both
    cost memory, at most ``limit``; gradients stay exact. On a device replays run on backward's
    stream, so they hide host time only. Settings that are not given keep their value. ``EBB_AHEAD``
    in the environment sets the number of regions, or the limit.

    Args:
        regions: how many outermost regions ahead of backward. 0, the default: off.
        limit: the most bytes, in the whole process, that are resident before backward needs them: a
            number, or text such as ``"512MiB"``. A larger region is replayed in part. Default
            1 GiB.

    Returns:
        All current settings by name; sizes in bytes.

    Raises:
        TypeError: a setting has the wrong type.
        ValueError: a setting is negative, too large, or text that is not a size.
    """
    changed = checked(locals(), _CHECKS)
    deferred.run()
    if changed.get("regions"):
        global_state_guard.install()
    _C.configure_ahead(_C.ahead_settings() | changed)
    return _C.ahead_settings()


if "ahead" in _C.plugins:
    # Ends the workers while the interpreter exists, because a replay may need it.
    atexit.register(_C.end_ahead)
    # Runs before Python takes locks for the fork, because ending a worker releases the GIL.
    os.register_at_fork(before=_C.stop_ahead)
