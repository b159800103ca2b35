"""Converts rules to C++ policies and back, and limits the number of rules."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Sequence
from fnmatch import translate
from typing import Any

import torch

from ebb import _C
from ebb._policy.decision import Decision
from ebb._policy.rule import ANY_SIZE, Part, Rule

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
    """Checks the number of rules before a policy is compiled.

    Raises:
        ValueError: there are too many rules.
    """
    if rules > _MOST:
        raise ValueError(f"ebb: a policy has at most {_MOST:,} rules; got {rules:,}")


def _check_rules_of_operators(policy: Any) -> None:
    """Checks the number of a compiled policy's rules for each registered operator.

    Raises:
        ValueError: too many rules match one operator.
    """
    rules, parts = policy.rules(), policy.parts()
    if len(rules) + len(parts) <= _MOST_OF_ONE_OPERATOR:
        return
    operators = registered()
    count: Counter[str] = Counter()
    begin = 0
    for end, _ in parts:
        # Operators that no rule without conditions has matched so far.
        undecided = set().union(*operators.values())
        for rule in rules[begin:end]:
            found = undecided.intersection(matching(rule.op, operators))
            count.update(found)
            if not _has_condition(rule):
                undecided -= found
        count.update(undecided)  # the part's default counts as a rule for these
        begin = end
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


def checked(compiled: _C.Policy) -> _C.Policy:
    """Returns `compiled`.

    Raises:
        ValueError: the policy has too many rules.
    """
    check_number(len(compiled.rules()))
    _check_rules_of_operators(compiled)
    return compiled


def compiled_rules(
    rules: Sequence[Rule], default: Decision, inputs: Decision, late: bool = False
) -> _C.Policy:
    """
    Args:
        late: True if operators that are not torch's own may be registered later.

    Raises:
        ValueError: the rules make no valid policy, see :class:`ebb.Policy`.
        NotImplementedError: an operator's schema is not understood.
    """
    check_number(len(rules))
    made = _C.Policy([rule._compile() for rule in rules], int(default), int(inputs), late)
    _check_rules_of_operators(made)
    return made


def compiled_parts(parts: Sequence[Part], inputs: Decision, late: bool = False) -> _C.Policy:
    """The inverse of `parts_of`; raises the errors of `compiled_rules`."""
    made = [compiled_rules(rules, default, inputs, late) for rules, default in parts]
    return made[0] if len(made) == 1 else checked(functools.reduce(_C.either, made))


def parts_of(compiled: _C.Policy) -> tuple[Part, ...]:
    """Rules and default of each policy that :func:`ebb.policies.either` joined."""
    ends = [end for end, _ in compiled.parts()]
    rules = tuple(map(Rule._from_compiled, compiled.rules()))
    return tuple(
        (rules[start:end], Decision(default))
        for start, (end, default) in zip([0, *ends], compiled.parts(), strict=False)
    )
