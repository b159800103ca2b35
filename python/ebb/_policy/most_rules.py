"""Limits for the number of a policy's rules, in all and for one operator."""

from __future__ import annotations

import re
from collections import Counter
from fnmatch import translate
from typing import Any

import torch

_MOST = 5_000
_MOST_OF_ONE_OPERATOR = 64  # as kMostCandidates in src/policy/compiled_policy.cpp
_ANY_SIZE = 2**64 - 1


def check_number(rules: int) -> None:
    """Checks the number of rules before a policy is compiled.

    Raises:
        ValueError: there are too many rules.
    """
    if rules > _MOST:
        raise ValueError(f"ebb: a policy has at most {_MOST:,} rules; got {rules:,}")


def check_rules_of_operators(policy: Any) -> None:
    """Checks the number of a compiled policy's rules for each registered operator.

    Raises:
        ValueError: too many rules match one operator.
    """
    rules, parts = policy.rules(), policy.parts()
    if len(rules) + len(parts) <= _MOST_OF_ONE_OPERATOR:
        return
    names = [_qualified(name) for name in torch._C._dispatch_get_all_op_names()]
    overloads: dict[str, set[str]] = {}
    for name in names:
        overloads.setdefault(name, set()).add(name)
        overloads.setdefault(name.rpartition(".")[0], set()).add(name)
    count: Counter[str] = Counter()
    begin = 0
    for end, _ in parts:
        undecided = set(names)  # operators that no rule without conditions has matched so far
        for rule in rules[begin:end]:
            matching = undecided & _matching(rule.op, overloads)
            count.update(matching)
            if not _has_condition(rule):
                undecided -= matching
        count.update(undecided)  # the part's default counts as a rule for these
        begin = end
    op, most = count.most_common(1)[0]
    if most > _MOST_OF_ONE_OPERATOR:
        raise ValueError(
            f"ebb: more than {_MOST_OF_ONE_OPERATOR} rules match {op} (the default counts as one). "
            "Merge some of them with a glob."
        )


def _qualified(name: str) -> str:
    return name if "." in name else name + ".default"


def _matching(pattern: str, overloads: dict[str, set[str]]) -> set[str]:
    if not set("*?[") & set(pattern):
        return overloads.get(pattern, set())
    matches = re.compile(translate(pattern)).match
    return set().union(*(found for name, found in overloads.items() if matches(name)))


def _has_condition(rule: Any) -> bool:
    on_call = rule.module or rule.every > 1 or rule.nth
    on_result = rule.name or rule.min_bytes or rule.max_bytes != _ANY_SIZE or rule.dtype
    return bool(on_call or on_result)
