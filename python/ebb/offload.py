"""How values with the decision OFFLOAD move to the host and back.

>>> settings = ebb.offload.configure(min_bytes="1MiB", in_flight_bytes="1GiB")
"""

from __future__ import annotations

import os
from typing import Any

from ebb import _C
from ebb._support.old import warn_of_old
from ebb._support.shown import shown
from ebb._support.sizes import Bytes, number_of_bytes, whole_number

__all__ = ["configure"]


def configure(
    *,
    min_bytes: Bytes | None = None,
    pinned_limit: Bytes | None = None,
    in_flight_bytes: Bytes | None = None,
    prefetch_bytes: Bytes | None = None,
    keep_last: int | None = None,
    disk: str | os.PathLike[str] | None = None,
    disk_limit: Bytes | None = None,
    static: bool | None = None,
) -> dict[str, Any]:
    """Set how values with the decision OFFLOAD move, for the whole process, from now on.

    What is not given stays as it is. Sizes are in bytes, as a number or as text such as
    ``"512MiB"``. In a job, the section ``[offload]`` of the file that ``EBB_CONFIG`` names has
    these settings; ``EBB_OFFLOAD_MIN_BYTES``, ``EBB_OFFLOAD_PINNED_LIMIT`` and
    ``EBB_OFFLOAD_DISK`` count more than that file.

    Args:
        min_bytes: smaller storages stay on the device: small copies cost more than they free.
            Default 1 MiB.
        pinned_limit: the most pinned host memory to hold. What finds no room is recomputed, or kept
            if it is an input. Default 16 GiB.
        in_flight_bytes: the most that may be on its way to the host; beyond it the host waits. 0:
            each copy is waited for. Default 1 GiB.
        prefetch_bytes: the most that is fetched before backward asks for it. Default 512 MiB.
        keep_last: the last so many values stay on the device, since backward needs them first.
            Default 0.
        disk: a directory on a fast disk. What finds no room in pinned memory moves on to a file
            there, and where there is no accelerator, values move from memory to that file. The file
            has no name, so nothing is left behind. ``""`` for none, the default.
        disk_limit: the most to use there. Default 64 GiB.
        static: for CUDA graphs: the host never asks whether a copy is done, nor waits for one; the
            compute stream does. Device memory is then freed when ``in_flight_bytes`` are on their
            way, and host memory is never freed. Run a step or more before the capture, so that host
            memory is there. Default False.

    Returns:
        All settings by name, as they are now; sizes in bytes.

    Raises:
        TypeError: a setting has the wrong type.
        ValueError: a setting is negative, too large, or text that is no size; or no file can be
            made in ``disk``.
    """
    given = {
        "min_bytes": min_bytes,
        "pinned_limit": pinned_limit,
        "in_flight_bytes": in_flight_bytes,
        "prefetch_bytes": prefetch_bytes,
        "disk_limit": disk_limit,
    }
    changed: dict[str, Any] = {
        name: number_of_bytes(name, value) for name, value in given.items() if value is not None
    }
    if keep_last is not None:
        changed["keep_last"] = whole_number("keep_last", keep_last, "values")
    if disk is not None:
        changed["disk"] = _folder(disk)
    if static is not None:
        if not isinstance(static, bool):
            raise TypeError(f"ebb: static must be a bool; got {shown(static)}")
        changed["static"] = static
    _C.configure_offload(_C.offload_settings() | changed)
    return _C.offload_settings()


def settings() -> dict[str, Any]:
    """Deprecated: :func:`configure` returns the settings."""
    warn_of_old("ebb.offload.settings()", "ebb.offload.configure()")
    return configure()


def stats() -> dict[str, int]:
    """Deprecated: see :func:`ebb.stats`."""
    warn_of_old("ebb.offload.stats()", 'ebb.stats()["offload"]')
    return _C.offload_stats()


def _folder(disk: object) -> str:
    if not isinstance(disk, str | os.PathLike):
        raise TypeError(
            f"ebb: disk must be a path; got {shown(disk)} of type {type(disk).__name__}"
        )
    path = os.fsdecode(disk)
    if not path.isprintable():
        raise ValueError(f"ebb: disk must be a path that can be printed; got {shown(path)}")
    return os.path.abspath(path) if path else ""
