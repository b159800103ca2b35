"""Applies the environment variables when ebb is imported."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable
from typing import TypeVar

from _ebb_switches import NEED_REGIONS, is_launcher, is_set

from ebb import _C
from ebb._config import config
from ebb._launch import unused_settings
from ebb._launch.frameworks import report_to
from ebb._launch.memory_limit import Limit, limit_of
from ebb._launch.variables import (
    apply_config,
    warn_setting_ignored,
    warn_unknown_variables,
    warn_value_ignored,
)
from ebb._plan.apply.module_policies import ModulePolicies
from ebb._plan.choose.memory_budget import read_budget
from ebb._policy.policy import Policy
from ebb._policy.text import has_regions, loaded, parsed
from ebb._policy.variable import ON, is_file
from ebb._report import files
from ebb._support.job import print_first
from ebb._support.shown import checked_name, clipped, shown
from ebb.policies import recompute_all

_T = TypeVar("_T")
_NO_GLOBS = ("auto", "none")


def _tell_of_modules_alone() -> None:
    modules = os.environ.get("EBB_MODULES")
    if modules and "EBB" not in os.environ and not _budget_text():
        warn_setting_ignored(
            f"ebb: EBB_MODULES={clipped(modules)} has no effect without EBB",
            "set EBB=1 to recompute these modules",
        )


def policy_from(text: str) -> Policy:
    """The policy that EBB names. Raises OSError, or ValueError if the text is no policy."""
    if text.lower() in ON:
        return recompute_all
    read = loaded if is_file(text) else parsed
    return Policy._from_compiled(read(text, late=True))


def _check_rank() -> None:
    text = os.environ.get("RANK", "0")
    try:
        value = int(text)
    except ValueError:
        value = -1
    if not 0 <= value < 2**31:
        warn_value_ignored("RANK", f"it must be an integer of 0 or more; got {shown(text)}")


def _check_verify() -> None:
    text = os.environ.get("EBB_VERIFY", "")
    if text.strip().lower() in ON:
        os.environ["EBB_VERIFY"] = text = "1"
    elif text and not is_set("EBB_VERIFY"):
        os.environ["EBB_VERIFY"] = text = "0"
    if text in ("", "0", "1", "demote"):
        return
    # C++ reads the variable when it first needs the mode, and would raise there.
    del os.environ["EBB_VERIFY"]
    _C.set_verify_mode(0)
    os.environ["EBB_VERIFY"] = text
    warn_value_ignored("EBB_VERIFY", f"it must be 0, 1 or demote; got {shown(text)}")


def _tell_what_was_verified() -> None:
    if is_launcher():
        return
    compared, differing = _C.verify_counts()
    print_first(
        f"ebb: EBB_VERIFY: of {compared:,} recomputed tensors that backward read, {differing:,} "
        "differed from the forward's"
        if compared
        else "ebb: EBB_VERIFY: nothing was compared, because backward read no recomputed tensor"
    )


def _checked(variable: str, check: Callable[[str], _T], otherwise: _T) -> _T:
    """What `check` makes of a variable's value; `otherwise` if it is unset or `check` raises."""
    if text := os.environ.get(variable, "").strip():
        try:
            return check(text)
        except Exception as error:
            warn_value_ignored(variable, error)
    return otherwise


def _start_reports() -> None:
    report, steps = _checked("EBB_REPORT", files.parse_report, ("", 0))
    if report:
        # for child processes that start after a change of the working directory
        os.environ["EBB_REPORT"] = f"{report}@{steps}" if steps else report
        files.start(report, steps)


def _start_ahead(text: str) -> bool:
    if text.isdecimal():
        config.ahead.regions = int(text)
    elif text[0].isdecimal():
        config.update(ahead_regions=1, ahead_limit=text)
    else:
        raise ValueError("it must be a number of regions, or a size such as 2GiB")
    return True


def _globs(text: str) -> tuple[str, ...]:
    """Globs over module names; "auto" or "none" alone."""
    globs = tuple(glob.strip() for glob in text.split(",") if glob.strip())
    for glob in globs:
        checked_name("a glob", glob)
        if glob in _NO_GLOBS and len(globs) > 1:
            raise ValueError(f"{glob!r} cannot be combined with module names")
    return globs


def _budget_text() -> str:
    return os.environ.get("EBB_BUDGET", "").strip()


def budget_and_file(text: str) -> tuple[int | float | Limit, str, str]:
    """Split a value of EBB_BUDGET such as ``40%@plan.toml``: bytes or a share, or for ``auto``, the
    limit on memory in use; the same in words; and the absolute path, empty if there is none. Raises
    ValueError."""
    words, at, path = map(str.strip, text.partition("@"))
    if at and not (path and path.isprintable()):
        raise ValueError(
            f"ebb: after the @, a budget must have the path of a file, such as 40%@plan.toml; got "
            f"{shown(text)}"
        )
    return limit_of(words) or read_budget(words), words, os.path.abspath(path) if path else ""


def _take_over() -> None:
    text = os.environ["EBB"] if is_set("EBB") else ""
    found = _checked("EBB_BUDGET", budget_and_file, None)
    budget, words, file = found or (None, "", "")
    if not text and budget is None:
        return
    globs: tuple[str, ...] = _checked("EBB_MODULES", _globs, ())
    named = tuple(glob for glob in globs if glob not in _NO_GLOBS)
    said = f"EBB={clipped(text)}" if text else f"EBB_BUDGET={clipped(_budget_text())}"
    try:
        # A torch without the private functions that it reads then switches ebb off.
        from ebb._launch import takeover  # noqa: PLC0415

        if text and is_file(text) and has_regions(text):
            names_them = f"the file of EBB={clipped(text)} lists the modules and their policies"
            if globs:
                warn_value_ignored("EBB_MODULES", names_them)
            if budget is not None:
                warn_value_ignored("EBB_BUDGET", names_them)
            takeover.install_modules(ModulePolicies._load(text, late=True), clipped(text))
            return
        policy = policy_from(text) if text else recompute_all
        if budget is None:
            finds_blocks, stay = globs in ((), ("auto",)), globs == ("auto",)
            takeover.install(policy, clipped(text), named, finds_blocks=finds_blocks, stay=stay)
        else:
            calls = (policy, clipped(text)) if text else None
            if globs == ("none",):
                warn_value_ignored(
                    "EBB_MODULES",
                    "a budget needs modules to plan for. Leave EBB_MODULES unset, or name modules",
                )
            if file:
                # for child processes that start after a change of the working directory
                os.environ["EBB_BUDGET"] = f"{words}@{file}"
            takeover.install_budget(budget, clipped(words), named, calls, file)
    except Exception as error:
        warn_setting_ignored(f"ebb: {said}", error, "is ignored, so the job runs without ebb")


def start() -> None:
    """Apply the environment variables. With EBB_STRICT, an invalid setting raises ValueError."""
    disables = is_set("EBB_DISABLE")
    _C.disable_everywhere(disables)
    report_to.offer_ebb()
    given = apply_config(os.environ.get("EBB_CONFIG", "").strip())
    if _checked("EBB_AHEAD", _start_ahead, False):
        given["ahead"] = ", ".join(filter(None, (given.get("ahead"), "EBB_AHEAD")))
    warn_unknown_variables()
    _check_rank()
    _check_verify()
    _start_reports()
    if disables:
        return
    if is_set("EBB_VERIFY") and _C.verify_mode() != 0:
        atexit.register(_tell_what_was_verified)
    _tell_of_modules_alone()
    _take_over()
    makes_regions = is_set("EBB") or bool(_budget_text())
    is_strict = is_set("EBB_STRICT")
    alone = ", ".join(filter(is_set, NEED_REGIONS)) if is_strict and not makes_regions else ""
    if given or makes_regions or alone:
        unused_settings.watch(given, alone, may_plan=bool(_budget_text()))
