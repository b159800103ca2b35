"""Choices: decisions for the results of a region's operators; and the policy for a choice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from ebb._policy.decision import OFFLOAD, PAGE, RECOMPUTE, RECOMPUTE_EACH_TIME, SAVE, Decision
from ebb._policy.policy import Policy
from ebb._policy.rule import Rule

Operators = frozenset[int]
"""Operators of a region, as indices from its first operator."""


@dataclass(frozen=True)
class Choice:
    """Decisions for the results of a region's operators. Operators in none of the sets are
    recomputed once."""

    saved: Operators = frozenset()
    offloaded: Operators = frozenset()  # and fetched for backward
    each_time: Operators = frozenset()  # recomputed each time that something needs the results
    inputs: bool = False  # True if inputs with a grad_fn are offloaded too
    paged: Operators = frozenset()  # the valid rows go to page pools
    paged_inputs: bool = False  # True if the valid rows of inputs go to page pools

    @property
    def kept(self) -> Operators:
        """Operators that need not be recomputed."""
        return self.saved | self.offloaded | self.paged

    def mapped(self, function: Callable[[Operators], Operators]) -> Choice:
        """The same choice with each set of operators mapped by a function."""
        return replace(
            self,
            saved=function(self.saved),
            offloaded=function(self.offloaded),
            each_time=function(self.each_time),
            paged=function(self.paged),
        )


EAGER = None
"""In place of a choice: the block is no region, and runs as in eager."""


_MOST = 60  # rules about single calls of one operator; a policy may have 64

Calls = Sequence[tuple[str, int]]
"""For each operator call in a region: its name, and which call of that operator it is, from 1."""


def policy_of(choice: Choice, calls: Calls) -> Policy:
    """The policy for a choice. Operators that the choice does not name are recomputed."""
    rules = [rule for of_name in _rules_by_name(choice, calls).values() for rule in of_name]
    inputs = PAGE if choice.paged_inputs else OFFLOAD if choice.inputs else SAVE
    return Policy(rules, inputs=inputs)


def can_be_said(choice: Choice, calls: Calls) -> Choice:
    """The choice, less the operators for which a policy would need too many rules."""
    rules = _rules_by_name(choice, calls)
    silent = {name for name, of_name in rules.items() if len(of_name) > _MOST}

    def others(operators: Operators) -> Operators:
        return frozenset(index for index in operators if calls[index][0] not in silent)

    return choice.mapped(others) if silent else choice


def _rules_by_name(choice: Choice, calls: Calls) -> dict[str, list[Rule]]:
    decisions = {
        **dict.fromkeys(choice.saved, SAVE),
        **dict.fromkeys(choice.offloaded, OFFLOAD),
        **dict.fromkeys(choice.each_time, RECOMPUTE_EACH_TIME),
        **dict.fromkeys(choice.paged, PAGE),
    }
    by_name: dict[str, dict[int, Decision]] = {}
    for index, (name, number) in enumerate(calls):
        by_name.setdefault(name, {})[number] = decisions.get(index, RECOMPUTE)
    return {name: _rules(name, of_name) for name, of_name in sorted(by_name.items())}


def _rules(name: str, decisions: Mapping[int, Decision]) -> list[Rule]:
    """Rules for one operator: exceptions for single calls, then the most frequent decision."""
    most = Counter(decisions.values()).most_common(1)[0][0]
    others = sorted(number for number, decision in decisions.items() if decision is not most)
    # `nth` skips the calls that the rules above match
    rules = [
        Rule(name, decisions[number], nth=number - above) for above, number in enumerate(others)
    ]
    return rules if most is RECOMPUTE else [*rules, Rule(name, most)]
