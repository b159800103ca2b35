"""The environment variables: how they are read, and messages about invalid values.

An invalid setting never breaks a job: ebb prints one line and ignores the setting. With EBB_STRICT
it raises a ValueError instead, which ends the job.
"""

from __future__ import annotations

import os
import tomllib
from contextlib import suppress

from _ebb_switches import is_set, meant_by, unknown_names

from ebb._config import config
from ebb._policy.text import nearest
from ebb._support.job import print_once
from ebb._support.shown import clipped, shown


def warn_setting_ignored(
    what: str, error: object, outcome: str = "", *, is_late: bool = False
) -> None:
    """Print once on each rank why the setting `what` has no effect; with EBB_STRICT, raise
    ValueError. `outcome`: what ebb does instead, such as "is ignored". `is_late`: True at exit,
    where EBB_STRICT cannot end the job any more."""
    reason = clipped(str(error).removeprefix("ebb: "), 500)
    if is_set("EBB_STRICT") and not is_late:
        raise ValueError(f"{what}: {reason} (the job ends, because EBB_STRICT is set)") from None
    line = f"{what} {outcome}: {reason}" if outcome else f"{what}: {reason}"
    print_once(line, on_each_rank=True)


def warn_value_ignored(variable: str, error: object) -> None:
    """As `warn_setting_ignored`, for the value of a variable."""
    warn_setting_ignored(f"ebb: {variable}={clipped(os.environ[variable])}", error, "is ignored")


def _settings_of(text: str) -> dict[str, dict[str, object]]:
    """The settings in a value of EBB_CONFIG, by section and name. `text`: the path of a TOML file,
    or settings such as ``offload.disk=/fast/disk,ahead.regions=1``. Raises OSError or ValueError.
    """
    found: dict[str, dict[str, object]] = {}
    if "=" not in text or os.path.isfile(text):
        with open(text, "rb") as file:
            found = tomllib.load(file)
    else:
        for item in text.split(","):
            name, equals, value = (part.strip() for part in item.partition("="))
            section, dot, setting = name.partition(".")
            if not (equals and dot):
                raise ValueError(f"{shown(item)} is no setting such as offload.min_bytes=1MiB")
            found.setdefault(section, {})[setting] = _value_of(value)
    sections = vars(config)
    for section, settings in found.items():
        if section not in sections:
            raise ValueError(f"unknown section [{section}]; {nearest(section, sections)}")
        if not isinstance(settings, dict):
            raise ValueError(f"{section} must be a section, [{section}]")
    return found


def _value_of(text: str) -> int | float | str:
    """A number if the text is one."""
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text


def apply_config(text: str) -> dict[str, str]:
    """Apply the settings in a value of EBB_CONFIG. Returns the sections whose settings are all
    valid, and for each what to call it in messages."""
    try:
        sections = _settings_of(text) if text else {}
    except (OSError, ValueError) as error:
        warn_value_ignored("EBB_CONFIG", error)
        return {}
    valid = {name: f"[{name}] of EBB_CONFIG={clipped(text)}" for name in sections if sections[name]}
    for section, settings in sections.items():
        for name, value in settings.items():
            try:
                config.update({f"{section}.{name}": value})
            except (AttributeError, TypeError, ValueError) as error:
                what = f"ebb: {section}.{name} in EBB_CONFIG={clipped(text)}"
                warn_setting_ignored(what, error, "is ignored")
                valid.pop(section, None)  # this may be why the section has no effect
    return valid


def warn_unknown_variables() -> None:
    for name in unknown_names():
        what = f"ebb: unknown environment variable {clipped(name)}"
        close, others = meant_by(name), "docs/reference/environment.md has all of them"
        warn_setting_ignored(what, f"did you mean {close}?" if close else others)
