"""The environment variables: how they are read, and messages about invalid values.

An invalid setting never breaks a job: ebb prints one line and ignores the setting. With EBB_STRICT
it raises a ValueError instead, which ends the job.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from inspect import signature
from typing import Any

from _ebb_switches import NAMES, is_set, unknown_names

from ebb._policy.text import nearest
from ebb._support.job import say
from ebb._support.shown import clipped, shown


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


# Variables of an earlier release, with functions that read their values. They still work, and a
# line says that EBB_CONFIG replaces them.
OLD: dict[str, Callable[[str, str], Any] | None] = {
    "EBB_OFFLOAD_IN_FLIGHT_BYTES": None,
    "EBB_OFFLOAD_PREFETCH_BYTES": None,
    "EBB_OFFLOAD_KEEP_LAST": _whole_number,
    "EBB_OFFLOAD_DISK_LIMIT": None,
    "EBB_OFFLOAD_STATIC": _flag,
    "EBB_PAGING_PAGE_ROWS": _whole_number,
    "EBB_PAGING_HEADROOM": _number,
    "EBB_PAGING_HOST_HEADROOM": _number,
    "EBB_PAGING_DEVICE_LIMIT": None,
    "EBB_PAGING_OVERFLOW": None,
    "EBB_PAGING_DEAD_ROWS": None,
    "EBB_PAGING_PREFETCH": _whole_number,
}
VARIABLES = sorted(NAMES - OLD.keys())  # the rows of docs/reference/environment.md


def say_ignored(what: str, error: object) -> None:
    """Say once in a job why a setting is ignored.

    Raises:
        ValueError: EBB_STRICT is set.
    """
    message = f"{what}: {clipped(str(error).removeprefix('ebb: '), 500)}"
    if is_set("EBB_STRICT"):
        raise ValueError(f"{message} (EBB_STRICT=1 ends the job)") from None
    say(message)


def say_value_ignored(variable: str, error: object) -> None:
    """As `say_ignored`, for the value of a variable."""
    say_ignored(f"ebb: {variable}={clipped(os.environ[variable])} is ignored", error)


def configure_from(section: str, names: Iterable[str], configure: Callable[..., object]) -> None:
    """Pass settings from environment variables to a module's `configure`.

    Args:
        section: ``"offload"`` or ``"paging"``.
        names: names of the settings.
        configure: takes the settings by name.

    Raises:
        ValueError: a setting is invalid, and EBB_STRICT is set.
    """
    for name in names:
        variable = f"EBB_{section}_{name}".upper()
        text = os.environ.get(variable)
        if text is None:
            continue
        read = OLD.get(variable)
        try:
            configure(**{name: read(variable, text) if read else text})
        except Exception as error:
            say_value_ignored(variable, error)
            continue
        if variable in OLD:
            say(
                f"ebb: {variable} is deprecated and will be removed in the next release: set "
                f"{name} in section [{section}] of a TOML file, and set EBB_CONFIG to its path"
            )


def configure_from_file(path: str, sections: Mapping[str, Callable[..., object]]) -> None:
    """Pass the settings in EBB_CONFIG's file to each module's `configure`.

    Args:
        path: of the file.
        sections: by name, such as ``"offload"``: a function that takes the section's settings.

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
        say_value_ignored("EBB_CONFIG", error)
        return
    for section, settings in sections_of_file.items():
        configure = sections[section]
        for name, value in settings.items():
            known = signature(configure).parameters
            try:
                if name not in known:
                    raise ValueError(f"unknown setting; {nearest(name, known)}")
                configure(**{name: value})
            except (TypeError, ValueError) as error:
                say_ignored(f"ebb: {name} in [{section}] of {clipped(path)} is ignored", error)


def tell_of_unknown() -> None:
    """Report variables that look like ebb's but do not exist."""
    for name in unknown_names():
        nearest = get_close_matches(name[:100], VARIABLES, 1)
        what = f"ebb: unknown environment variable {clipped(name)}"
        others = "docs/reference/environment.md has all of them"
        say_ignored(what, f"did you mean {nearest[0]}?" if nearest else others)
