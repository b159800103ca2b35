"""Joins names of modules that differ only by numbers: ``layers.0-31.mlp``."""

from __future__ import annotations

import re
from collections.abc import Iterable

_NUMBER = re.compile(r"(?<![^.])(?:0|[1-9]\d{0,8})(?![^.])")


def template(name: str) -> tuple[str, int]:
    """A name with ``#`` for each part that is a number, and the count of such parts."""
    return _NUMBER.subn("#", name)


def ranges(names: list[str]) -> str:
    """One name for names of one template: each number becomes a range."""
    numbers = [[int(n) for n in _NUMBER.findall(name)] for name in names]
    columns = iter([_range(set(column)) for column in zip(*numbers, strict=True)])
    return _NUMBER.sub(lambda _: next(columns), names[0])


def in_ranges(names: Iterable[str]) -> list[str]:
    """The names, with names of one template joined."""
    groups: dict[tuple[str, int], list[str]] = {}
    for name in names:
        groups.setdefault(template(name), []).append(name)
    return [ranges(group) for group in groups.values()]


def _range(numbers: set[int]) -> str:
    least, most = min(numbers), max(numbers)
    if len(numbers) == most - least + 1:
        return str(least) if least == most else f"{least}-{most}"
    return ",".join(str(n) for n in sorted(numbers))
