"""How many rules a policy can have, and how many of them can be about one operator."""

from __future__ import annotations

import re
from collections import Counter
from fnmatch import translate
from typing import Any

import torch

_MOST = 5_000
_MOST_OF_ONE_OPERATOR = 64  # kMostCandidates in src/policy/policy.cpp, which counts likewise
_ANY_SIZE = 2**64 - 1


def check_number(rules: int) -> None:
    """Before a policy is compiled.

    Raises:
        ValueError: there are too many.
    """
    if rules > _MOST:
        raise ValueError(f"ebb: a policy has at most {_MOST:,} rules; got {rules:,}")


def check_rules_of_operators(policy: Any) -> None:
    """That a compiled policy can be asked about every operator that is registered now.

    Raises:
        ValueError: too many rules match one of them.
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
        undecided = set(names)  # by a rule of this part that asks for no more than the operator
        for rule in rules[begin:end]:
            matching = undecided & _matching(rule.op, overloads)
            count.update(matching)
            if not _has_condition(rule):
                undecided -= matching
        count.update(undecided)  # their part's default decides
        begin = end
    op, most = count.most_common(1)[0]
    if most > _MOST_OF_ONE_OPERATOR:
        raise ValueError(
            f"ebb: more than {_MOST_OF_ONE_OPERATOR} rules of a policy match {op}, its default "
            "counted. Join some by a glob."
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
