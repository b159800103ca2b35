"""Reports settings of environment variables that have no effect."""

from __future__ import annotations

import atexit
import itertools
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from _ebb_switches import is_launcher, is_set
from torch.optim.optimizer import register_optimizer_step_post_hook

from ebb import _C
from ebb._launch.variables import warn_setting_ignored
from ebb._region import in_graph
from ebb._report.text import size

_STEPS = 2  # of optimizers, after which a setting without effect ends a strict job

# Note [Settings without effect]
# A setting of OFFLOAD, PAGE or replays ahead may have no effect, such as a disk for a job that
# offloads nothing. ebb reports such settings at exit, in processes in which a region has run. With
# EBB_STRICT such a setting ends the job in the second optimizer step, unless a plan of a budget may
# still use it. Replays ahead depend on the load of the machine, so they never end a job. A strict
# job with settings, but without EBB and EBB_BUDGET, also ends if no region has run until then.


def _why_without_effect(section: str) -> str:
    """Empty if the settings of the section had an effect."""
    if section == "paging":
        return "" if _C.paging_stats()["steps"] else "no policy pages a tensor"
    if section == "ahead":
        regions = (n for name, n in _C.ahead_stats().items() if name.startswith("regions_"))
        is_off = _C.ahead_settings()["regions"] == 0
        return "" if is_off or any(regions) else "ebb recomputed no region ahead of backward"
    stats = _C.offload_stats()
    if stats["bytes_sent"] or stats["bytes_refused"]:
        return ""
    largest, least = stats["most_too_small"], _C.offload_settings()["min_bytes"]
    if not largest:
        return "no policy offloads a tensor that backward needs"
    return (
        f"the largest tensor that the policy offloads takes {size(largest)}, and OFFLOAD leaves "
        f"tensors of less than {size(least)} in place. To offload it, set "
        f"ebb.config.offload.min_bytes, or EBB_CONFIG=offload.min_bytes={largest}"
    )


_undo = ExitStack()


def watch(given: Mapping[str, str], alone: str, may_plan: bool) -> None:
    """Report settings without effect. See Note [Settings without effect]. `given`: the user's
    settings of each section, in words. `alone`: variables to report if no region runs. `may_plan`:
    True if a later plan may use the settings."""
    stop()
    atexit.register(_report, given, alone, is_late=True)
    _undo.callback(atexit.unregister, _report)
    if not is_set("EBB_STRICT") or may_plan:
        return
    steps = itertools.count(1)

    def after_step(*_: Any) -> None:
        if next(steps) == _STEPS:
            hook.remove()
            _report(given, alone, is_late=False)

    hook = register_optimizer_step_post_hook(after_step)
    _undo.callback(hook.remove)


def _report(given: Mapping[str, str], alone: str, *, is_late: bool) -> None:
    if is_launcher():
        return
    if not _C.stats()["regions"]:
        if alone and not in_graph.names_entered():
            why = "no region has run in this process. Set EBB=1 (or EBB_BUDGET) to make regions"
            _warn(alone, f"{why} without a change of the program", is_late)
        return
    named = dict(given)
    if "offload" in _C.plugins and _C.offload_stats()["most_too_small"]:
        named.setdefault("offload", "the decision OFFLOAD")
    for section, name in named.items():
        if (is_late or section != "ahead") and (reason := _why_without_effect(section)):
            _warn(name, reason, is_late)


def _warn(name: str, reason: str, is_late: bool) -> None:
    if not is_late:
        stop()  # the error ends the job
    warn_setting_ignored(f"ebb: {name} has no effect", reason, is_late=is_late)


def stop() -> None:
    _undo.close()
