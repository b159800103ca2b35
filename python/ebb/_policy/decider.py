"""Applies a policy to operators that torch gives by name, outside of eager regions.

torch's selective checkpointing and ebb's pass over compiled graphs ask once for each operator.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Hashable, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

import torch

from ebb._policy.decision import Decision
from ebb._policy.rule import Rule


class Result(NamedTuple):
    """One output of a call."""

    nbytes: int
    dtype: torch.dtype


class Decider:
    """Makes one region's decisions by a policy. Counts calls for rules with ``every``, ``nth``."""

    def __init__(self, rules: Sequence[Rule], default: Decision) -> None:
        self._rules, self._default = rules, default
        self._calls: Counter[Hashable] = Counter()

    def decide(
        self, op: str, results: Sequence[Result | None], modules: tuple[str, ...] = ()
    ) -> list[Decision]:
        """The decision for each result of one call of the operator `op`, such as
        ``aten::mm.default``. A result None (unknown, or no tensor) matches only rules without
        conditions on an output. `modules`: names of the innermost running module; empty if
        unknown."""

        @functools.cache  # counts a call once, although the call may have several results
        def is_called(index: int) -> bool:
            return self._matches_call(index, op, modules)

        def decision(result: Result | None) -> Decision:
            for index, rule in enumerate(self._rules):
                if _matches_result(rule, result) and is_called(index):
                    return rule.decision
            return self._default

        return list(map(decision, results))

    def _matches_call(self, index: int, op: str, modules: tuple[str, ...]) -> bool:
        rule = self._rules[index]
        pattern = str(rule.op)
        if not (fnmatchcase(op.rsplit(".", 1)[0], pattern) or fnmatchcase(op, pattern)):
            return False
        if rule.module is not None and not any(fnmatchcase(m, rule.module) for m in modules):
            return False
        key = (index, modules if rule.per_module else ())
        self._calls[key] += 1
        call = self._calls[key]
        return call == rule.nth if rule.nth else call % rule.every == 0


def _matches_result(rule: Rule, result: Result | None) -> bool:
    if rule.name is not None:
        return False  # torch does not know the names that ebb.checkpoint_name gave
    if result is None:
        return rule.dtype is None and rule.max_bytes is None and not rule.min_bytes
    most = result.nbytes if rule.max_bytes is None else int(rule.max_bytes)
    return int(rule.min_bytes) <= result.nbytes <= most and rule.dtype in (None, result.dtype)
