"""Parses and checks settings: whole numbers, numbers of bytes, switches."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from ebb._support.job import ranks_of_node
from ebb._support.shown import shown

Bytes: TypeAlias = "int | str"
Checks: TypeAlias = Mapping[str, Callable[[str, Any], Any]]  # by name of a setting

_UNITS = {"": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_UNITS |= {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_LARGEST = 2**63 - 1
_MOST_DIGITS = 100  # of a text; Python's conversions raise for much longer ones


def number_of_bytes(name: str, value: object) -> int:
    if isinstance(value, str):
        text = value.strip()
        found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text[: _MOST_DIGITS + 1])
        unit = _UNITS.get(found[2].upper()) if found and len(text) <= _MOST_DIGITS else None
        if found is None or unit is None:
            raise ValueError(
                f"ebb: {name} must be a number of bytes, such as 1048576, '1MiB' or '2.5 GiB' "
                f"(units: B, KiB, MiB, GiB, TiB, and KB, MB, GB, TB of 1000); got {shown(value)}"
            )
        value = round(float(found[1]) * unit) if "." in found[1] else int(found[1]) * unit
    return whole_number(name, value, "bytes")


def bytes_of_rank(name: str, value: object) -> int:
    """A limit of this process. A text such as ``"64GiB/node"`` is a limit for all ranks of a node,
    which each get an equal part.

    Raises:
        ValueError: the text is no size, or the number of ranks on the node is unknown.
    """
    if isinstance(value, str) and value.rstrip().lower().endswith("/node"):
        return number_of_bytes(name, value.rstrip()[: -len("/node")]) // ranks_of_node(name)
    return number_of_bytes(name, value)


def whole_number(
    name: str, value: object, unit: str = "", least: int = 0, most: int = _LARGEST
) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"ebb: {name} must be an int{' or a str' if unit == 'bytes' else ''}; "
                        f"got {shown(value)} of type {type(value).__name__}")  # fmt: skip
    if not least <= value <= most:
        has_most = unit or most < _LARGEST
        limits = f"from {least} to {most} {unit}".rstrip() if has_most else f"{least} or more"
        raise ValueError(f"ebb: {name} must be {limits}; got {shown(value)}")
    return value


def checked(given: Mapping[str, object], checks: Checks) -> dict[str, Any]:
    """The settings that are given, not None, as their checks return them."""
    return {name: checks[name](name, value) for name, value in given.items() if value is not None}
