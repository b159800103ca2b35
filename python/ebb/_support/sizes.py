"""Parses and checks settings: numbers, numbers of bytes, names, folders."""

from __future__ import annotations

import os
import re
from typing import TypeAlias

from ebb._support.job import ranks_of_node
from ebb._support.shown import shown

Bytes: TypeAlias = "int | str"

# As Kubernetes reads them: G is 10^9. Slurm and Docker mean 2^30, so a budget in G stays below
# their limit.
_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGT", start=1):
    _UNITS |= dict.fromkeys((_letter, f"{_letter}B"), 1000**_power)
    _UNITS |= dict.fromkeys((f"{_letter}I", f"{_letter}IB"), 1024**_power)
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
                "(units: B; KiB, MiB, GiB, TiB or Ki, Mi, Gi, Ti of 1024; KB, MB, GB, TB or K, M, "
                f"G, T of 1000); got {shown(value)}"
            )
        value = round(float(found[1]) * unit) if "." in found[1] else int(found[1]) * unit
    return whole_number(name, value, "bytes")


def bytes_of_rank(name: str, value: object) -> int:
    """A limit of this process. A text such as ``"64GiB/node"`` is a limit for all ranks of a node,
    which each get an equal part."""
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


def factor(name: str, value: object, least: int, most: int) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"ebb: {name} must be a number; got {shown(value)}")
    if not least <= value <= most:
        raise ValueError(f"ebb: {name} must be from {least} to {most}; got {shown(value)}")
    return float(value)


def choice(name: str, value: object, choices: tuple[str, ...]) -> str:
    if value not in choices:
        raise ValueError(f"ebb: {name} must be one of {', '.join(choices)}; got {shown(value)}")
    return str(value)


def folder(name: str, value: object) -> str:
    """The absolute path; empty for an empty path."""
    if not isinstance(value, str | os.PathLike):
        raise TypeError(
            f"ebb: {name} must be a path; got {shown(value)} of type {type(value).__name__}"
        )
    path = os.fsdecode(value)
    if not path.isprintable():
        raise ValueError(f"ebb: {name} must be a path that can be printed; got {shown(path)}")
    return os.path.abspath(path) if path else ""
