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
from ebb._support import deferred, devices
from ebb._support.old import old_function
from ebb._support.sizes import Bytes, Checks, checked, number_of_bytes, switch, whole_number

__all__ = ["configure"]

_CHECKS: Checks = {
    "regions": functools.partial(whole_number, unit="regions"),
    "limit": number_of_bytes,
    "busy_cores": switch,
    "side_stream": switch,
}


def configure(
    *,
    regions: int | None = None,
    limit: Bytes | None = None,
    busy_cores: bool | None = None,
    side_stream: bool | None = None,
) -> dict[str, Any]:
    """Set how far replays run ahead of backward, for the whole process, from the next region on.

    While backward works on one outermost region, another thread replays the next one. The tensors
    that autograd saves in the last region are not freed, so backward need not recompute them. Both
    cost memory, at most ``limit``; gradients stay exact. Settings that are not given keep their
    value. ``EBB_AHEAD`` in the environment sets the number of regions, or the limit.

    Args:
        regions: how many outermost regions ahead of backward. 0, the default: off.
        limit: the most bytes, in the whole process, that are resident before backward needs them: a
            number, or text such as ``"512MiB"``. A larger region is replayed in part. Default
            1 GiB.
        busy_cores: replay ahead on the CPU with any number of threads. By default replays run ahead
            on the CPU only if the process has at least twice ``torch.get_num_threads()`` cores.
        side_stream: on a device, replay on a second stream, so that the kernels of replays and of
            backward can run at the same time. Otherwise replays run on backward's stream, which
            hides host time only. Default False.

    Returns:
        All current settings by name; sizes in bytes.

    Raises:
        TypeError: a setting has the wrong type.
        ValueError: a setting is negative, too large, or text that is not a size; or ``side_stream``
            is true, and the program has its own CUDA memory allocator.
    """
    changed = checked(locals(), _CHECKS)
    deferred.run()
    if changed.get("side_stream") and devices.may_lack_record_stream():
        raise ValueError(
            "ebb: side_stream=True needs torch's own memory allocator: a CUDAPluggableAllocator "
            "may reuse memory while the other stream still reads it"
        )
    if changed.get("regions"):
        global_state_guard.install()
    _C.configure_ahead(_C.ahead_settings() | changed)
    return _C.ahead_settings()


# Deprecated.
settings = old_function("ebb.ahead.settings", "ebb.ahead.configure()", configure)
stats = old_function("ebb.ahead.stats", 'ebb.stats()["ahead"]', lambda: _C.ahead_stats())


if "ahead" in _C.plugins:
    # Ends the workers while the interpreter exists, because a replay may need it.
    atexit.register(_C.end_ahead)
    # Runs before Python takes locks for the fork, because ending a worker releases the GIL.
    os.register_at_fork(before=_C.stop_ahead)
