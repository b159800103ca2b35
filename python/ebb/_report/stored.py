"""Reports in JSON files. In: the dictionary of a file. Out: the fields of a report."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ebb._policy.variable import JobPolicy
from ebb._report.planned import ReportedPlan
from ebb._report.rows import FATES, Row
from ebb._support.shown import shown

FORMAT = 2  # version of the file format


def fields_of(document: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of :class:`ebb.Report` for what its ``to_dict()`` returned.

    Raises:
        ValueError, TypeError, KeyError, IndexError, AttributeError: the dictionary is no report of
            this format.
    """
    if not isinstance(document, dict) or "format" not in document:
        raise ValueError("it has no format version")
    if (version := document["format"]) != FORMAT:
        raise ValueError(
            f"its format version is {shown(version)}, expected {FORMAT}; use the release of ebb "
            "that wrote it"
        )
    stacks = [tuple(map(_text, stack)) for stack in document["stacks"]]
    plan, policy = document["plan"], document["policy"]
    return {
        **{key: int(document[key]) for key in ("step", "peak_held", "peak_eager")},
        "rows": tuple(_row(row, stacks) for row in document["rows"]),
        "ahead": {_text(name): int(count) for name, count in document["ahead"].items()},
        "idle_rules": tuple(map(_text, document["idle_rules"])),
        **{key: _tuples(document[key]) for key in ("timeline", "values", "replays", "spans")},
        "plan": None if plan is None else _plan(plan),
        "policy": None if policy is None else JobPolicy(**policy),
    }


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"a text is {shown(value)}")
    return value


def _tuples(lists: Iterable[Iterable[Any]]) -> tuple[tuple[Any, ...], ...]:
    return tuple(map(tuple, lists))


_NUMBERS: dict[str, type | tuple[type, ...]] = {"int": int, "float": (int, float)}


def _row(given: Mapping[str, Any], stacks: list[tuple[str, ...]]) -> Row:
    row = Row(**{**given, "shape": tuple(given["shape"]), "stack": stacks[given["stack"]]})
    if row.fate not in FATES:
        raise ValueError(f"unknown fate {shown(row.fate)}")
    for name, field in Row.__dataclass_fields__.items():
        value = getattr(row, name)
        if field.type == "str":
            _text(value)
        elif not isinstance(value, _NUMBERS.get(str(field.type), tuple)):
            raise TypeError(f"{name} of a row is {shown(value)}")
    return row


def _check_numbers(value: object, key: str = "") -> None:
    """Checks that all of a plan but names are numbers."""
    if isinstance(value, dict):
        for name, inner in value.items():
            _check_numbers(inner, name)
    elif isinstance(value, list):
        for inner in value:
            _check_numbers(inner, key)
    elif isinstance(value, str) and key not in ("modules", "spans"):
        raise TypeError(f"{key} of a plan is {shown(value)}")


def _plan(given: dict[str, Any]) -> ReportedPlan:
    _check_numbers(given)
    return ReportedPlan.from_json(given)
