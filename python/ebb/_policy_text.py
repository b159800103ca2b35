"""Policies as text: TOML files, and one line for an environment variable."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

from ebb._decision import RECOMPUTE, SAVE, Decision
from ebb._policy import Policy, Rule, from_parts

_DECISIONS = {decision.name.lower(): decision for decision in Decision}
_RULE_KEYS = (
    "op", "decision", "every", "nth", "per_module", "module", "name", "min_bytes", "max_bytes",
    "dtype", "force",
)  # fmt: skip
_PART_KEYS = ("default", "rules")
_POLICY_KEYS = (*_PART_KEYS, "inputs", "preset", "either")


def presets() -> dict[str, Policy]:
    """The policies that have a name."""
    from ebb import policies

    named = {name: getattr(policies, name) for name in policies.__all__}
    return {name: policy for name, policy in named.items() if isinstance(policy, Policy)}


def _nearest(name: str, known: Iterable[str]) -> str:
    found = get_close_matches(name, known, 1, cutoff=0.0)
    return f"nearest: {found[0]!r}"


class _At:
    """A place in a file, for errors."""

    def __init__(self, file: str, path: str = "") -> None:
        self.file = file
        self.path = path

    def __truediv__(self, key: str | int) -> _At:
        step = f"[{key}]" if isinstance(key, int) else f".{key}" if self.path else key
        return _At(self.file, self.path + step)

    def error(self, what: object) -> ValueError:
        text = str(what).removeprefix("ebb: ")
        return ValueError(f"ebb: {self.file}: {self.path + ': ' if self.path else ''}{text}")

    def table(self, value: object, known: tuple[str, ...]) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise self.error(f"must be a table; got {value!r}")
        for key in value:
            if key not in known:
                raise (self / key).error(f"there is no such key; {_nearest(key, known)}")
        return value

    def array(self, value: object) -> list[Any]:
        if not isinstance(value, list):
            raise self.error(f"must be an array of tables; got {value!r}")
        return value

    def decision(self, value: object) -> Decision:
        if not isinstance(value, str) or value.lower() not in _DECISIONS:
            raise self.error(f"{value!r} is no decision; {_nearest(str(value), _DECISIONS)}")
        return _DECISIONS[value.lower()]


def _full_name(op: str) -> str:
    """torch's own operators need no namespace."""
    return op if "::" in op or "." in op or op.startswith("*") else f"aten::{op}"


def _rule(table: object, at: _At) -> Rule:
    given = dict(at.table(table, _RULE_KEYS))
    for key in ("op", "decision"):
        if key not in given:
            raise at.error(f"{key!r} is missing")
    given["decision"] = (at / "decision").decision(given["decision"])
    if not isinstance(given["op"], str):
        raise (at / "op").error(f"must be a string; got {given['op']!r}")
    given["op"] = _full_name(given["op"])
    try:
        rule = Rule(given.pop("op"), given.pop("decision"), **given)
        Policy([rule])  # finds what no operator matches
    except (TypeError, ValueError, NotImplementedError) as error:
        raise at.error(error) from None
    return rule


def _rules(tables: object, at: _At) -> list[Rule]:
    return [_rule(table, at / i) for i, table in enumerate(at.array(tables))]


def _policy(table: object, at: _At) -> Policy:
    given = at.table(table, _POLICY_KEYS)
    rules = _rules(given.get("rules", []), at / "rules")
    inputs = (at / "inputs").decision(given.get("inputs", "save"))
    if inputs is RECOMPUTE:
        raise (at / "inputs").error("a region's inputs have no recipe: 'save', 'offload' or 'page'")
    default = (at / "default").decision(given.get("default", "recompute"))
    try:
        if "preset" in given:
            base = _preset(given["preset"], at / "preset")
            if "default" in given or "either" in given:
                raise at.error("a preset has a default of its own; leave out 'default', 'either'")
            inputs = inputs if "inputs" in given else base.inputs
            first, *rest = base._parts()
            return from_parts((((*rules, *first[0]), first[1]), *rest), inputs)
        if "either" in given:
            if "default" in given or "rules" in given:
                raise at.error("'either' stands alone; give each of its policies rules, default")
            parts = []
            for i, part in enumerate((at / "either").array(given["either"])):
                here = at / "either" / i
                part = here.table(part, _PART_KEYS)
                part_default = (here / "default").decision(part.get("default", "recompute"))
                parts.append((tuple(_rules(part.get("rules", []), here / "rules")), part_default))
            if not parts:
                raise (at / "either").error("must not be empty")
            return from_parts(tuple(parts), inputs)
        return Policy(rules, default, inputs)
    except NotImplementedError as error:
        raise at.error(error) from None


def _preset(name: object, at: _At) -> Policy:
    known = presets()
    if not isinstance(name, str) or name not in known:
        raise at.error(f"{name!r} is no preset; {_nearest(str(name), known)}")
    return known[name]


def load(path: str | os.PathLike[str]) -> Policy:
    """See :meth:`ebb.Policy.load`."""
    at = _At(os.fspath(path))
    with open(path, "rb") as file:
        try:
            table = tomllib.load(file)
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise at.error(error) from None
    return _policy(table, at)


def _line(key: str, value: object) -> str:
    if isinstance(value, Decision):
        value = value.name.lower()
    elif not isinstance(value, bool | int | str):
        value = str(value).removeprefix("torch.")  # a dtype
    return f"{key} = {json.dumps(value)}\n"


def _rule_lines(rule: Rule) -> str:
    lines = _line("op", rule.op) + _line("decision", rule.decision)
    for key in _RULE_KEYS[2:]:
        value = getattr(rule, key)
        if value != Rule.__dataclass_fields__[key].default:
            lines += _line(key, value)
    return lines


def to_toml(policy: Policy) -> str:
    """See :meth:`ebb.Policy.dump`."""
    parts = policy._parts()
    text = "" if policy.inputs is SAVE else _line("inputs", policy.inputs)
    for rules, default in parts:
        prefix = "either." if len(parts) > 1 else ""
        text += "\n[[either]]\n" if prefix else ""
        text += _line("default", default)
        for rule in rules:
            text += f"\n[[{prefix}rules]]\n" + _rule_lines(rule)
    return text.lstrip("\n")


def parse(text: str) -> Policy:
    """See :meth:`ebb.Policy.parse`."""
    text = text.strip()
    known = presets()
    if text in known:
        return known[text]
    at = _At(f"policy {text!r}")
    rules: list[Rule] = []
    default, inputs = RECOMPUTE, SAVE
    for entry in filter(None, map(str.strip, text.split(","))):
        op, colon, decision = (part.strip() for part in entry.rpartition(":"))
        if not colon or op.endswith(":"):
            raise at.error(
                f"{entry!r} is no preset ({_nearest(entry, known)}) and has no decision, as in "
                "'mm:save'"
            )
        if op == "default":
            default = at.decision(decision)
        elif op == "inputs":
            inputs = at.decision(decision)
        else:
            rules.append(_rule({"op": op, "decision": decision}, at))
    if not rules and "default" not in text and "inputs" not in text:
        raise at.error("is empty; write 'mm:save,gelu:recompute', say, or the name of a preset")
    try:
        return Policy(rules, default, inputs)
    except (ValueError, NotImplementedError) as error:
        raise at.error(error) from None
