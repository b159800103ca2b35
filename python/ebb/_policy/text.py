"""Policies as text: TOML files, and one line for an environment variable."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import starmap
from typing import Any

from ebb import _C
from ebb._policy.compiled import PRESETS, check_number, compiled_rules, rules_of
from ebb._policy.decision import MADE_AGAIN, RECOMPUTE, SAVE, Decision
from ebb._policy.idle_rules import warn_of_composites
from ebb._policy.rule import Rule
from ebb._support.shown import clipped, shown
from ebb._support.sizes import number_of_bytes, whole_number

_DECISIONS = {decision.name.lower(): decision for decision in Decision}
_RULE_KEYS = (
    "op", "decision", "every", "nth", "per_module", "module", "name", "min_bytes", "max_bytes",
    "dtype", "force",
)  # fmt: skip
_OFFLOAD_KEYS = ("min_bytes", "in_flight_bytes", "prefetch_bytes", "keep_last")
_POLICY_KEYS = ("default", "rules", "inputs", "preset")


def nearest(name: str, known: Iterable[str]) -> str:
    """Text for an error message: the known name nearest to `name`, or all if none is near."""
    known = list(known)
    found = get_close_matches(name[:100], known, 1)
    if found:
        return f"did you mean {found[0]!r}?"
    return f"valid names: {', '.join(map(repr, known))}"


@dataclass(frozen=True)
class _At:
    """A position in a policy file, for error messages."""

    file: str
    path: str = ""
    late: bool = False  # True if operators that are not torch's own may be registered later

    def __truediv__(self, key: str | int) -> _At:
        step = f"[{key}]" if isinstance(key, int) else "." * bool(self.path) + clipped(key)
        return _At(self.file, self.path + step, self.late)

    def error(self, what: object) -> ValueError:
        text = str(what).removeprefix("ebb: ")
        return ValueError(f"ebb: {self.file}: {self.path + ': ' if self.path else ''}{text}")

    def table(self, value: object, known: tuple[str, ...]) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise self.error(f"must be a table; got {shown(value)}")
        for key in value:
            if key not in known:
                raise (self / key).error(f"unknown key; {nearest(key, known)}")
        return value

    def array(self, value: object) -> list[Any]:
        if not isinstance(value, list):
            raise self.error(f"must be an array of tables; got {shown(value)}")
        return value

    def decision(self, value: object) -> Decision:
        if not isinstance(value, str) or value.lower() not in _DECISIONS:
            raise self.error(
                f"unknown decision {shown(value)}; {nearest(shown(value), _DECISIONS)}"
            )
        return _DECISIONS[value.lower()]


def _rule(table: object, at: _At) -> Rule:
    given = dict(at.table(table, _RULE_KEYS))
    for key in ("op", "decision"):
        if key not in given:
            raise at.error(f"{key!r} is missing")
    given["decision"] = (at / "decision").decision(given["decision"])
    op = given.pop("op")
    if not isinstance(op, str):
        raise (at / "op").error(f"must be a string; got {shown(op)}")
    if not ("::" in op or "." in op or op.startswith("*")):
        op = f"aten::{op}"  # torch's own operators may omit the namespace
    try:
        return Rule(op, given.pop("decision"), **given)
    except (TypeError, ValueError) as error:
        raise at.error(error) from None


def _check(rules: list[Rule], places: list[_At], at: _At) -> None:
    """Checks that the rules make a valid policy; the error names the first invalid rule."""
    try:
        check_number(len(rules))
    except ValueError as error:
        raise at.error(error) from None
    try:
        compiled_rules(list(dict.fromkeys(rules)), RECOMPUTE, SAVE, at.late)  # each rule once
        return
    except (ValueError, NotImplementedError) as error:
        whole = error
    for rule, place in zip(rules, places, strict=True):
        try:
            compiled_rules([rule], RECOMPUTE, SAVE, at.late)
        except (ValueError, NotImplementedError) as error:
            raise place.error(error) from None
    raise at.error(whole)


def _rules(tables: object, at: _At) -> list[Rule]:
    array = at.array(tables)
    places = [at / i for i in range(len(array))]
    rules = [_rule(table, place) for table, place in zip(array, places, strict=True)]
    _check(rules, places, at)
    warn_of_composites(rules)
    return rules


def _policy(table: object, at: _At) -> _C.Policy:
    given = at.table(table, _POLICY_KEYS)
    rules = _rules(given.get("rules", []), at / "rules")
    default = (at / "default").decision(given.get("default", "recompute"))
    inputs = (at / "inputs").decision(given.get("inputs", "save"))
    if inputs in MADE_AGAIN:
        raise (at / "inputs").error(
            "inputs of a region cannot be recomputed: must be 'save', 'offload' or 'page'"
        )
    if "preset" in given:
        name = given["preset"]
        if not isinstance(name, str) or name not in PRESETS:
            raise (at / "preset").error(
                f"unknown preset {shown(name)}; {nearest(shown(name), PRESETS)}"
            )
        if "default" in given:
            raise at.error("'preset' cannot be combined with 'default'")
        base = PRESETS[name]
        inputs = inputs if "inputs" in given else Decision(base.inputs())
        rules, default = [*rules, *rules_of(base)], Decision(base.fallback())
    try:
        return compiled_rules(rules, default, inputs, at.late)
    except (ValueError, NotImplementedError) as error:
        raise at.error(error) from None


def _read(path: str | os.PathLike[str], late: bool = False) -> tuple[dict[str, Any], _At]:
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"ebb: a policy's file must be a path; got {shown(path)}")
    at = _At(clipped(os.fsdecode(path), 1000), late=late)
    try:
        with open(path, "rb") as file:
            return tomllib.load(file), at
    except RecursionError:
        raise at.error("it is nested too deeply") from None
    except ValueError as error:  # not TOML or UTF-8, a number of too many digits, a path with \0
        raise at.error(error) from None


def loaded(path: str | os.PathLike[str], late: bool = False) -> _C.Policy:
    """See ``ebb.Policy.load``; `late`: operators may be registered later."""
    return _policy(*_read(path, late))


# Modules and their policies, the settings of OFFLOAD, and True if replays may run ahead.
Regions = tuple[list[tuple[list[str], _C.Policy]], dict[str, int], bool]


def loaded_regions(path: str | os.PathLike[str], late: bool = False) -> Regions:
    """See ``ebb.ModulePolicies.load``. `late`: as for `loaded`."""
    return _regions(*_read(path, late))


def parsed_regions(text: str, name: str) -> Regions:
    """As `loaded_regions`, of the text of a file; `name` names it in errors. Operators may be
    registered later."""
    return _regions(tomllib.loads(text), _At(name, late=True))


def policy_of(document: dict[str, Any], name: str) -> _C.Policy:
    """As `loaded`, of a file that was read before. `name`: of the file, for errors."""
    return _policy(document, _At(name, late=True))


def _regions(document: dict[str, Any], at: _At) -> Regions:
    found = []
    known: set[str] = set()
    whole = at.table(document, ("regions", "offload", "ahead", "plan"))  # [plan]: see PlanFile
    ahead = whole.get("ahead", True)
    if not isinstance(ahead, bool):
        raise (at / "ahead").error(f"must be true or false; got {shown(ahead)}")
    tables = (at / "regions").array(whole.get("regions"))
    for number, table in enumerate(tables):
        here = at / "regions" / number
        given = dict(here.table(table, ("modules", *_POLICY_KEYS)))
        names = given.pop("modules", None)
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise (here / "modules").error("must be an array of names")
        for name in names:
            if name in known:
                raise (here / "modules").error(
                    f"module {shown(name)} is listed twice; give each module one policy"
                )
            known.add(name)
        found.append((names, _policy(given, here)))
    return found, _offload(whole.get("offload", {}), at / "offload"), ahead


def _offload(table: object, at: _At) -> dict[str, int]:
    found = {}
    for key, value in at.table(table, _OFFLOAD_KEYS).items():
        try:
            is_count = key == "keep_last"
            found[key] = (
                whole_number(key, value, "values") if is_count else number_of_bytes(key, value)
            )
        except (TypeError, ValueError) as error:
            raise (at / key).error(error) from None
    return found


def has_regions(path: str | os.PathLike[str]) -> bool:
    """True if `loaded_regions` reads such a file, False if `loaded` does."""
    return "regions" in _read(path)[0]


def regions_to_toml(
    groups: Iterable[tuple[list[str], str]],
    offload: Mapping[str, int],
    ahead: bool,
    plan: Mapping[str, object] | None = None,
) -> str:
    """See ``ebb.ModulePolicies.save``. `groups`: modules, and their policy as TOML; `plan`: the
    table with this name."""
    head = "" if ahead else _line("ahead", ahead) + "\n"
    groups = list(groups)
    head += "" if groups else "regions = []\n"
    named = {"plan": plan, "offload": offload}
    tables = [f"[{name}]\n" + "".join(starmap(_line, t.items())) for name, t in named.items() if t]
    for names, policy in groups:
        listed = "".join(f"    {json.dumps(name, ensure_ascii=False)},\n" for name in names)
        listed = listed.replace("\x7f", "\\u007f")
        tables.append(f"[[regions]]\nmodules = [\n{listed}]\n{policy}")
    return head + "\n".join(tables)


def _line(key: str, value: object) -> str:
    if isinstance(value, Decision):
        value = value.name.lower()
    elif not isinstance(value, bool | int | float | str | list):
        value = str(value).removeprefix("torch.")  # a dtype
    # TOML allows no surrogates, and the character DEL only as an escape
    text = json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return f"{key} = {text}\n"


def rule_line(rule: Rule) -> str:
    """A rule as an inline table, so that a policy of many rules takes a line for each."""
    given = {"op": rule.op, "decision": rule.decision}
    for key in _RULE_KEYS[2:]:
        value = getattr(rule, key)
        if value != Rule.__dataclass_fields__[key].default:
            given[key] = value
    return "{ " + ", ".join(_line(*pair).rstrip("\n") for pair in given.items()) + " }"


def to_toml(rules: Iterable[Rule], default: Decision, inputs: Decision) -> str:
    """See ``ebb.Policy.to_toml``."""
    text = "" if inputs is SAVE else _line("inputs", inputs)
    text += _line("default", default)
    lines = "".join(f"    {rule_line(rule)},\n" for rule in rules)
    return text + (f"rules = [\n{lines}]\n" if lines else "")


def parsed(text: str, late: bool = False) -> _C.Policy:
    """See ``ebb.Policy.parse``; `late` as for `loaded`."""
    text = text.strip()
    if text in PRESETS:
        return PRESETS[text]
    at = _At(f"policy {shown(text)}", late=late)
    table: dict[str, Any] = {"rules": []}
    entries = [entry for entry in map(str.strip, text.split(",")) if entry]
    for entry in entries:
        op, colon, decision = (part.strip() for part in entry.rpartition(":"))
        if entry in PRESETS and "preset" not in table:
            table["preset"] = entry
        elif not colon or op.endswith(":"):
            raise at.error(
                f"{shown(entry)} is neither a preset ({nearest(entry, PRESETS)}) nor a rule "
                "such as 'mm:save'"
            )
        elif op in ("default", "inputs"):
            table[op] = decision
        else:
            table["rules"].append({"op": op, "decision": decision})
    if not entries:
        raise ValueError(
            "ebb: the policy text is empty; write for example 'mm:save,gelu:recompute', or the "
            "name of a preset"
        )
    return _policy(table, at)
