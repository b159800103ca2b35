"""The environment variables: how they are read, and messages about invalid values.

An invalid setting never breaks a job: ebb prints one line and ignores the setting. With EBB_STRICT
it raises a ValueError instead, which ends the job.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from inspect import signature

from _ebb_switches import NAMES, is_set, unknown_names

from ebb._policy.text import nearest
from ebb._support.job import print_once
from ebb._support.shown import clipped


def warn_setting_ignored(
    what: str, error: object, outcome: str = "", *, is_late: bool = False
) -> None:
    """Print once in a job why a setting has no effect.

    Args:
        what: the setting.
        error: the reason.
        outcome: what ebb does instead, such as "is ignored".
        is_late: True at exit: EBB_STRICT cannot end the job any more.

    Raises:
        ValueError: EBB_STRICT is set. The message does not contain `outcome`.
    """
    reason = clipped(str(error).removeprefix("ebb: "), 500)
    if is_set("EBB_STRICT") and not is_late:
        raise ValueError(f"{what}: {reason} (the job ends, because EBB_STRICT is set)") from None
    print_once(f"{what} {outcome}: {reason}" if outcome else f"{what}: {reason}")


def warn_value_ignored(variable: str, error: object) -> None:
    """As `warn_setting_ignored`, for the value of a variable."""
    warn_setting_ignored(f"ebb: {variable}={clipped(os.environ[variable])}", error, "is ignored")


def configure_from_file(path: str, sections: Mapping[str, Callable[..., object]]) -> list[str]:
    """Pass the settings of each section in EBB_CONFIG's file to the function in `sections`. Returns
    the names of these sections.

    Raises:
        ValueError: a setting is invalid, and EBB_STRICT is set.
    """
    try:
        with open(path, "rb") as file:
            sections_of_file = tomllib.load(file)
        for section, settings in sections_of_file.items():
            if section not in sections:
                raise ValueError(f"unknown section [{section}]; {nearest(section, sections)}")
            if not isinstance(settings, dict):
                raise ValueError(f"{section} must be a section, [{section}]")
    except (OSError, ValueError) as error:
        warn_value_ignored("EBB_CONFIG", error)
        return []
    for section, settings in sections_of_file.items():
        configure = sections[section]
        for name, value in settings.items():
            known = signature(configure).parameters
            try:
                if name not in known:
                    raise ValueError(f"unknown setting; {nearest(name, known)}")
                configure(**{name: value})
            except (TypeError, ValueError) as error:
                warn_setting_ignored(
                    f"ebb: {name} in [{section}] of {clipped(path)}", error, "is ignored"
                )
    return list(sections_of_file)


def warn_unknown_variables() -> None:
    """Report variables that look like ebb's but do not exist."""
    for name in unknown_names():
        nearest = get_close_matches(name[:100], sorted(NAMES), 1)
        what = f"ebb: unknown environment variable {clipped(name)}"
        others = "docs/reference/environment.md has all of them"
        warn_setting_ignored(what, f"did you mean {nearest[0]}?" if nearest else others)
