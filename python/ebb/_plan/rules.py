"""Rules that keep what a plan keeps of a region."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from ebb._policy.decision import RECOMPUTE, SAVE
from ebb._policy.policy import Policy
from ebb._policy.rule import Rule

_MOST = 60  # rules about single calls of one operator; a policy has room for 64

Calls = Sequence[tuple[str, int]]
"""Names of operators, and the how-manieth call of each in the region, from 1."""


def policy_of(kept: Iterable[tuple[str, int]], calls: Calls) -> Policy:
    """A policy that keeps these calls of operators and recomputes all others.

    Args:
        kept: what is kept.
        calls: all that the region does.
    """
    numbers: dict[str, list[int]] = {}
    for name, number in sorted(kept):
        numbers.setdefault(name, []).append(number)
    counts = Counter(name for name, _ in calls)
    rules = []
    for name, chosen in numbers.items():
        if len(chosen) == counts[name]:
            rules.append(Rule(name, SAVE))
        elif len(chosen) <= _MOST:
            rules += _single(name, chosen, SAVE)
        else:
            others = sorted(set(range(1, counts[name] + 1)) - set(chosen))
            rules += [*_single(name, others, RECOMPUTE), Rule(name, SAVE)]
    return Policy(rules)


def can_be_said(kept: Iterable[tuple[str, int]], calls: Calls) -> set[tuple[str, int]]:
    """What is left of `kept` without operators for which a policy has no room."""
    found = set(kept)
    counts = Counter(name for name, _ in calls)
    for name, chosen in Counter(name for name, _ in found).items():
        if min(chosen, counts[name] - chosen) > _MOST:
            found -= {one for one in found if one[0] == name}
    return found


def _single(name: str, numbers: Iterable[int], decision: object) -> list[Rule]:
    """Each rule takes one call away from those below."""
    return [
        Rule(name, decision, nth=number - above)  # type: ignore[arg-type]
        for above, number in enumerate(numbers)
    ]
