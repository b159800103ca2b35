"""Environment variables: ebb in a job whose code does not know of it."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from typing import Any, NamedTuple

from _ebb_autoload import is_set

from ebb._policy import Policy
from ebb.policies import recompute_all


class Variable(NamedTuple):
    """One row of docs/environment.md."""

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
        "globs, separated by commas", "none", "modules whose forward becomes a region, in any model"
    ),
    "EBB_DISABLE": Variable("`0` or `1`", "0", "`1`: EBB and EBB_MODULES count as not set"),
    "EBB_VERIFY": Variable("`0`, `1` or `demote`", "0", "compare replays with the forward"),
    "EBB_REPORT": Variable(
        "file", "none", "a report of the last step, at exit; `.html`, `.json`, `.txt` or `.png`"
    ),
    "EBB_TRACE": Variable("folder", "none", "a Perfetto trace of each of the last ten steps"),
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
# Read when ebb is built or tested.
_ELSEWHERE = ("EBB_CUDA", "EBB_SANITIZE", "EBB_BUILD_DIR", "EBB_CMAKE_ARGS", "EBB_TEST_")


def rank() -> int:
    """Of this process in its job; 0 if it is alone."""
    value = os.environ.get("RANK", "0")
    return int(value) if value.isdigit() else 0


def configure_from(
    prefix: str,
    names: Iterable[str],
    parse: Callable[[str, str], Any],
    configure: Callable[..., None],
) -> None:
    """Gives a module's `configure` what variables of this prefix say, parsed by name.

    Raises:
        ValueError: a setting makes no sense; the message names the variable.
    """
    for name in names:
        variable = prefix + name.upper()
        text = os.environ.get(variable)
        if text is None:
            continue
        try:
            configure(**{name: parse(name, text)})
        except ValueError as error:
            raise ValueError(f"{error} (from the environment variable {variable})") from None


def _warn_of_unknown() -> None:
    for name in os.environ:
        if name.startswith("EBB_") and name not in VARIABLES and not name.startswith(_ELSEWHERE):
            nearest = get_close_matches(name, VARIABLES, 1, cutoff=0.0)[0]
            warnings.warn(
                f"ebb: there is no environment variable {name}; the nearest is {nearest}",
                stacklevel=2,
            )


def policy_from(text: str) -> Policy:
    """The policy that EBB names.

    Raises:
        OSError: it is a file that cannot be read.
        ValueError: it is no policy.
    """
    if text.lower() in ("1", "true", "yes", "on"):
        return recompute_all
    if text.endswith(".toml") or os.path.isfile(text):
        return Policy.load(text)
    return Policy.parse(text)


def _start_reports() -> None:
    report, trace = os.environ.get("EBB_REPORT", ""), os.environ.get("EBB_TRACE", "")
    if report or trace:
        from ebb import _report_files

        try:
            _report_files.start(report, trace)
        except (OSError, ValueError) as error:
            print(f"ebb writes no report: {error}", file=sys.stderr)


def start() -> None:
    """Does what the variables say; when ebb is imported, once per process."""
    _warn_of_unknown()
    _start_reports()
    if not is_set("EBB") or is_set("EBB_DISABLE"):
        return
    from ebb import _takeover

    text = os.environ["EBB"]
    try:
        if os.environ.get("EBB_VERIFY", "") not in ("", "0", "1", "demote"):
            raise ValueError("EBB_VERIFY must be 0, 1 or demote")
        policy = policy_from(text)
        patterns = [p.strip() for p in os.environ.get("EBB_MODULES", "").split(",") if p.strip()]
        _takeover.install(policy, text, tuple(patterns))
    except Exception as error:
        print(f"ebb is off: EBB={text}: {str(error).removeprefix('ebb: ')}", file=sys.stderr)
