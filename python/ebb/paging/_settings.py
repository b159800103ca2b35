"""Settings of PAGE: how values move to page pools and back."""

from __future__ import annotations

from typing import Any

from ebb import _C
from ebb._support.shown import shown
from ebb._support.sizes import Bytes, number_of_bytes, whole_number

_MODES = ("deferred", "blocking", "assert")
_DEAD_ROWS = ("repeat", "zero", "nan", "none")
_NO_LIMIT = 2**64 - 1
_MOST_HEADROOM = 1000


def _factor(name: str, value: object, least: int) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"ebb: {name} must be a number; got {shown(value)}")
    if not least <= value <= _MOST_HEADROOM:
        raise ValueError(
            f"ebb: {name} must be from {least} to {_MOST_HEADROOM}; got {shown(value)}"
        )
    return float(value)


def _choice(name: str, value: object, choices: tuple[str, ...]) -> int:
    if value not in choices:
        raise ValueError(f"ebb: {name} must be one of {', '.join(choices)}; got {shown(value)}")
    return choices.index(value)


def configure(
    *,
    page_rows: int | None = None,
    headroom: float | None = None,
    host_headroom: float | None = None,
    device_limit: Bytes | None = None,
    overflow: str | None = None,
    dead_rows: str | None = None,
    prefetch: int | None = None,
) -> dict[str, Any]:
    """Set how values with the decision PAGE move, for the whole process.

    Settings that are not given keep their value. In a job, the section ``[paging]`` of the file
    that ``EBB_CONFIG`` names has these settings. Sizes apply to pools that ebb allocates from now
    on; :func:`reset` drops existing pools.

    Args:
        page_rows: rows of a page. Default 64.
        headroom: the size of a pool, relative to the need of the recorded step; at least 1.
            Default 1.1.
        host_headroom: the size of a pool's second tier, in pinned host memory that kernels address
            directly, as a multiple of the same need. 0, the default: no second tier. If pinned
            memory is missing, the pool has no second tier, and ebb warns.
        device_limit: the most bytes of all pools on one device, as a number or as text such as
            ``"4GiB"``; pools shrink in proportion. Default: no limit.
        overflow: what happens if a pool is full. ``"deferred"``, the default: the host does not
            wait, and :func:`step_ok` reports the overflow after the step. ``"blocking"``: the host
            waits for each tensor, and the overflow raises :class:`PageOverflowError` at once; in
            :func:`run_step` with several processes, after all have agreed. ``"assert"``: an
            assertion on the device.
        dead_rows: the contents of restored padding rows. ``"repeat"``, the default: copies of the
            first valid row, which are as safe to differentiate as that row. ``"zero"``; ``"nan"``;
            or ``"none"``: uninitialised memory. In verify mode (:func:`ebb.verify`, except
            ``"demote"``) always NaN, which reveals a program that depends on padding rows.
        prefetch: the number of layers whose pages are restored ahead of backward, 0 or 1, in steps
            marked by :func:`step`; -1, the default: 1 on accelerators, 0 on the CPU.

    Returns:
        All current settings by name; sizes in bytes, ``None`` for no limit.

    Raises:
        TypeError: a setting has the wrong type.
        ValueError: a setting is out of range.
    """
    changed: dict[str, Any] = {}
    if page_rows is not None:
        changed["page_rows"] = whole_number("page_rows", page_rows, "rows", 1, 2**31 - 1)
    if headroom is not None:
        changed["headroom"] = _factor("headroom", headroom, 1)
    if host_headroom is not None:
        changed["host_headroom"] = _factor("host_headroom", host_headroom, 0)
    if device_limit is not None:
        changed["device_limit"] = number_of_bytes("device_limit", device_limit)
    if overflow is not None:
        changed["overflow"] = _choice("overflow", overflow, _MODES)
    if dead_rows is not None:
        changed["dead_rows"] = _choice("dead_rows", dead_rows, _DEAD_ROWS)
    if prefetch is not None:
        if isinstance(prefetch, bool) or not isinstance(prefetch, int):
            raise TypeError(f"ebb: prefetch must be an int; got {shown(prefetch)}")
        if prefetch not in (-1, 0, 1):
            raise ValueError(f"ebb: prefetch must be 0, 1 or -1; got {shown(prefetch)}")
        changed["prefetch"] = prefetch
    _C.configure_paging(_C.paging_settings() | changed)
    found = _C.paging_settings()
    limit = found["device_limit"]
    return found | {
        "overflow": _MODES[found["overflow"]],
        "dead_rows": _DEAD_ROWS[found["dead_rows"]],
        "device_limit": None if limit == _NO_LIMIT else limit,
    }
