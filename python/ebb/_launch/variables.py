"""Environment variables: which there are, how they are read, and what is told of senseless ones.

A setting that makes no sense never breaks a job: one line tells of it, and it counts as not set.
With EBB_STRICT it raises a ValueError instead, which ends the job.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from typing import Any, NamedTuple

from _ebb_switches import is_set, unknown_names

from ebb._support.job import say
from ebb._support.shown import clipped, shown


class Variable(NamedTuple):
    """One row of docs/reference/environment.md."""

    kind: str
    default: str
    meaning: str


VARIABLES = {
    "EBB": Variable(
        "policy",
        "0",
        "`1` (`recompute_all`), a policy's name, a TOML file, or a line as `mm:save`; `0`: off",
    ),
    "EBB_MODULES": Variable(
        "globs, separated by commas; `auto` or `none`",
        "the blocks, if the job does not call checkpoint",
        "modules that become regions, in any model; `auto`: the blocks of each model, in any job; "
        "`none`: no module",
    ),
    "EBB_BUDGET": Variable(
        "size, share or `auto`",
        "none",
        "memory to keep to (`24GiB`, or `40%` of what a step takes): steps are measured, and it is "
        "planned what blocks keep; `auto`: once there is no room",
    ),
    "EBB_DISABLE": Variable(
        "`0` or `1`", "0", "`1`: EBB, EBB_MODULES and EBB_BUDGET count as not set"
    ),
    "EBB_STRICT": Variable(
        "`0` or `1`",
        "0",
        "`1`: the job ends if a setting is invalid or has no effect, or if a budget is too small",
    ),
    "EBB_VERIFY": Variable("`0`, `1` or `demote`", "0", "compare replays with the forward"),
    "EBB_REPORT": Variable(
        "file", "none", "a report of the last step, at exit; `.html`, `.json` or `.txt`"
    ),
    "EBB_TRACE": Variable("folder", "none", "a Perfetto trace of each of the last ten steps"),
    "EBB_AHEAD": Variable(
        "number, size or `auto`",
        "0",
        "regions that are replayed ahead of backward, or most bytes for one",
    ),
    "EBB_OFFLOAD_MIN_BYTES": Variable("size", "1MiB", "smaller storages stay on the device"),
    "EBB_OFFLOAD_PINNED_LIMIT": Variable("size", "16GiB", "most pinned host memory"),
    "EBB_OFFLOAD_IN_FLIGHT_BYTES": Variable("size", "1GiB", "most on its way to the host"),
    "EBB_OFFLOAD_PREFETCH_BYTES": Variable("size", "512MiB", "most fetched ahead of need"),
    "EBB_OFFLOAD_KEEP_LAST": Variable("number", "0", "the last values stay on the device"),
    "EBB_OFFLOAD_DISK": Variable("folder", "none", "the disk tier's"),
    "EBB_OFFLOAD_DISK_LIMIT": Variable("size", "64GiB", "most on disk"),
    "EBB_PAGING_PAGE_ROWS": Variable("number", "64", "rows of a page"),
    "EBB_PAGING_HEADROOM": Variable(
        "factor", "1.1", "size of a page pool, over what a step needed"
    ),
    "EBB_PAGING_HOST_HEADROOM": Variable("factor", "0", "likewise, of its tier in pinned memory"),
    "EBB_PAGING_DEVICE_LIMIT": Variable("size", "none", "most bytes of page pools on a device"),
    "EBB_PAGING_OVERFLOW": Variable(
        "`deferred`, `blocking` or `assert`", "deferred", "what happens if a pool has no room"
    ),
    "EBB_PAGING_DEAD_ROWS": Variable(
        "`repeat`, `zero`, `nan` or `none`", "repeat", "what dead rows become"
    ),
    "EBB_PAGING_PREFETCH": Variable("`-1`, `0` or `1`", "-1", "layers that come back ahead"),
    "EBB_OFFLOAD_STATIC": Variable("`0` or `1`", "0", "for CUDA graphs"),
}


def _whole_number(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"ebb: {name} must be a whole number; got {shown(text)}") from None


def _number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"ebb: {name} must be a number; got {shown(text)}") from None


def _flag(name: str, text: str) -> bool:
    if text not in ("0", "1"):
        raise ValueError(f"ebb: {name} must be 0 or 1; got {shown(text)}")
    return text == "1"


# By a variable's kind; what is of another is a text.
_READERS: dict[str, Callable[[str, str], Any]] = {
    "number": _whole_number,
    "`-1`, `0` or `1`": _whole_number,
    "factor": _number,
    "`0` or `1`": _flag,
}


def say_ignored(what: str, error: object) -> None:
    """Tells why a setting counts as not set, once in a job.

    Raises:
        ValueError: EBB_STRICT is set.
    """
    message = f"{what}: {clipped(str(error).removeprefix('ebb: '), 500)}"
    if is_set("EBB_STRICT"):
        raise ValueError(f"{message} (EBB_STRICT=1 ends the job)") from None
    say(message)


def say_value_ignored(variable: str, error: object) -> None:
    """As `say_ignored`, for what a variable says."""
    say_ignored(f"ebb: {variable}={clipped(os.environ[variable])} is ignored", error)


def configure_from(prefix: str, names: Iterable[str], configure: Callable[..., None]) -> None:
    """Gives a module's `configure` what variables of this prefix say.

    Args:
        prefix: such as ``"EBB_OFFLOAD_"``.
        names: of its settings.
        configure: takes them by name.

    Raises:
        ValueError: a setting makes no sense, and EBB_STRICT is set.
    """
    for name in names:
        variable = prefix + name.upper()
        text = os.environ.get(variable)
        if text is None:
            continue
        read = _READERS.get(VARIABLES[variable].kind)
        try:
            configure(**{name: read(name, text) if read else text})
        except Exception as error:
            say_value_ignored(variable, error)


def tell_of_unknown() -> None:
    """Tells of variables that look like ebb's and are none."""
    for name in unknown_names():
        nearest = get_close_matches(name[:100], VARIABLES, 1)
        what = f"ebb: there is no environment variable {clipped(name)}"
        others = "docs/reference/environment.md has all of them"
        say_ignored(what, f"the nearest is {nearest[0]}" if nearest else others)
