"""Settings of PAGE: how values move to page pools and back."""

from __future__ import annotations

from functools import partial
from typing import Any

from ebb import _C
from ebb._support.shown import shown
from ebb._support.sizes import Bytes, Checks, checked, number_of_bytes, whole_number

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


_CHECKS: Checks = {
    "page_rows": partial(whole_number, unit="rows", least=1, most=2**31 - 1),
    "headroom": partial(_factor, least=1),
    "host_headroom": partial(_factor, least=0),
    "device_limit": number_of_bytes,
    "overflow": partial(_choice, choices=_MODES),
    "dead_rows": partial(_choice, choices=_DEAD_ROWS),
    "prefetch": partial(whole_number, least=-1, most=1),
}


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
    changed = checked(locals(), _CHECKS)
    _C.configure_paging(_C.paging_settings() | changed)
    found = _C.paging_settings()
    limit = found["device_limit"]
    return found | {
        "overflow": _MODES[found["overflow"]],
        "dead_rows": _DEAD_ROWS[found["dead_rows"]],
        "device_limit": None if limit == _NO_LIMIT else limit,
    }
