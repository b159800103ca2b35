"""Converts rules to C++ policies and back, and checks them."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from ebb import _C
from ebb._policy.decision import Decision
from ebb._policy.most_rules import check_number, check_rules_of_operators
from ebb._policy.rule import Part, Rule


def checked(compiled: _C.Policy) -> _C.Policy:
    """Returns `compiled`.

    Raises:
        ValueError: the policy has too many rules.
    """
    check_number(len(compiled.rules()))
    check_rules_of_operators(compiled)
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
    check_rules_of_operators(made)
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
