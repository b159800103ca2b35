"""Converts rules to C++ policies and back, and limits the number of rules."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from fnmatch import translate
from typing import Any

import torch

from ebb import _C
from ebb._policy.decision import Decision
from ebb._policy.rule import ANY_SIZE, Rule

_MOST = 5_000
_MOST_OF_ONE_OPERATOR = 64  # as kMostCandidates in src/policy/compiled_policy.cpp


PRESETS: dict[str, _C.Policy] = {
    "recompute_all": _C.recompute_all(),
    "save_all": _C.save_all(),
    "save_matmuls": _C.save_matmuls(),
    "offload_inputs": _C.offload_inputs(),
    "recompute_collectives": _C.recompute_collectives(),
    "torchtitan": _C.torchtitan(),
    "dots_saveable": _C.dots_saveable(),
    "dots_with_no_batch_dims_saveable": _C.dots_with_no_batch_dims_saveable(),
}


def check_number(rules: int) -> None:
    """Checks the number of rules before a policy is compiled."""
    if rules > _MOST:
        raise ValueError(f"ebb: a policy has at most {_MOST:,} rules; got {rules:,}")


def _check_rules_of_operators(policy: Any) -> None:
    """Checks the number of a compiled policy's rules for each registered operator."""
    rules = policy.rules()
    if len(rules) < _MOST_OF_ONE_OPERATOR:
        return
    operators = registered()
    count: Counter[str] = Counter()
    undecided = set().union(*operators.values())  # no rule without conditions has matched so far
    for rule in rules:
        found = undecided.intersection(matching(rule.op, operators))
        count.update(found)
        if not _has_condition(rule):
            undecided -= found
    count.update(undecided)  # the default counts as a rule for these
    op, most = count.most_common(1)[0]
    if most > _MOST_OF_ONE_OPERATOR:
        raise ValueError(
            f"ebb: more than {_MOST_OF_ONE_OPERATOR} rules match {op} (the default counts as one). "
            "Merge some of them with a glob."
        )


def registered() -> dict[str, list[str]]:
    """The registered operators, such as ``aten::mm.default``, by name with and without overload."""
    operators: dict[str, list[str]] = {}
    for name in torch._C._dispatch_get_all_op_names():
        full = name if "." in name else name + ".default"
        for key in (full, full.rpartition(".")[0]):
            operators.setdefault(key, []).append(full)
    return operators


def matching(pattern: str, operators: dict[str, list[str]]) -> list[str]:
    """Those of the `registered` operators that a pattern matches."""
    if not set("*?[") & set(pattern):  # fast, for policies of many rules
        return operators.get(pattern, [])
    matches = re.compile(translate(pattern)).match
    found = (full for name, all_full in operators.items() if matches(name) for full in all_full)
    return list(dict.fromkeys(found))


def _has_condition(rule: Any) -> bool:
    on_call = rule.module or rule.every > 1 or rule.nth
    on_result = rule.name or rule.min_bytes or rule.max_bytes != ANY_SIZE or rule.dtype
    return bool(on_call or on_result)


def compiled_rules(
    rules: Sequence[Rule], default: Decision, inputs: Decision, late: bool = False
) -> _C.Policy:
    """`late`: True if operators that are not torch's own may be registered later."""
    check_number(len(rules))
    made = _C.Policy([rule._compile() for rule in rules], int(default), int(inputs), late)
    _check_rules_of_operators(made)
    return made


def rules_of(compiled: _C.Policy) -> tuple[Rule, ...]:
    """The rules, in order."""
    return tuple(map(Rule._from_compiled, compiled.rules()))
