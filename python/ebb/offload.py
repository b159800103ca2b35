"""Settings of OFFLOAD: how values move to the host and back.

>>> settings = ebb.offload.configure(min_bytes="1MiB", in_flight_bytes="1GiB")
"""

from __future__ import annotations

import functools
import os
from typing import Any

from ebb import _C
from ebb._support import deferred
from ebb._support.shown import shown
from ebb._support.sizes import (
    Bytes,
    Checks,
    bytes_of_rank,
    checked,
    number_of_bytes,
    whole_number,
)

__all__ = ["configure"]


def _folder(name: str, disk: object) -> str:
    if not isinstance(disk, str | os.PathLike):
        raise TypeError(
            f"ebb: {name} must be a path; got {shown(disk)} of type {type(disk).__name__}"
        )
    path = os.fsdecode(disk)
    if not path.isprintable():
        raise ValueError(f"ebb: {name} must be a path that can be printed; got {shown(path)}")
    return os.path.abspath(path) if path else ""


_CHECKS: Checks = {
    "min_bytes": number_of_bytes,
    "pinned_limit": bytes_of_rank,
    "in_flight_bytes": number_of_bytes,
    "prefetch_bytes": number_of_bytes,
    "keep_last": functools.partial(whole_number, unit="values"),
    "disk": _folder,
    "disk_limit": bytes_of_rank,
}


def configure(
    *,
    min_bytes: Bytes | None = None,
    pinned_limit: Bytes | None = None,
    in_flight_bytes: Bytes | None = None,
    prefetch_bytes: Bytes | None = None,
    keep_last: int | None = None,
    disk: str | os.PathLike[str] | None = None,
    disk_limit: Bytes | None = None,
) -> dict[str, Any]:
    """Set how values with the decision OFFLOAD move, for the whole process, from now on.

    Settings that are not given keep their value. Sizes are in bytes, as a number or as text such as
    ``"512MiB"``. A limit such as ``"64GiB/node"`` is for all ranks of a node together, which each
    get an equal part. In a job, the section ``[offload]`` of the file that ``EBB_CONFIG`` names has
    these settings; ``EBB_OFFLOAD_MIN_BYTES``, ``EBB_OFFLOAD_PINNED_LIMIT`` and
    ``EBB_OFFLOAD_DISK`` override that file.

    Args:
        min_bytes: smaller storages stay on the device, because small copies cost more than they
            free. Default 1 MiB.
        pinned_limit: the most pinned host memory to use. A value that finds no pinned memory is
            recomputed, or kept if it is an input. Default 16 GiB.
        in_flight_bytes: the most bytes in flight to the host, whose device memory is not released
            yet; beyond it the device waits for the first copy. 0: it waits for each copy. Values of
            the last two regions are in flight, so most programs stay below. Default 1 GiB.
        prefetch_bytes: the most bytes to fetch before backward needs them; never more than two
            regions' worth. Default 512 MiB.
        keep_last: how many of the values packed last stay on the device, because backward needs
            them first. Default 0.
        disk: a directory on a fast disk. If pinned memory is full, values move on to a file there.
            Without an accelerator, values move from memory to that file. The file has no name and
            disappears when the process ends. ``""``, the default: no disk.
        disk_limit: the most bytes to use on disk. Default 64 GiB.

    Returns:
        All current settings by name; sizes in bytes.

    Raises:
        TypeError: a setting has the wrong type.
        ValueError: a setting is negative, too large, or text that is not a size; no file can be
            made in ``disk``; or a limit is per node, and the launcher does not say how many ranks
            run there.
    """
    changed = checked(locals(), _CHECKS)
    deferred.run()
    _C.configure_offload(_C.offload_settings() | changed)
    return _C.offload_settings()
