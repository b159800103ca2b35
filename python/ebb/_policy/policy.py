"""Policies, which give each operator a decision."""

from __future__ import annotations

import functools
import itertools
import os
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from ebb import _C
from ebb._policy.compiled import compiled_rules, rules_of
from ebb._policy.decision import MADE_AGAIN, OFFLOAD, RECOMPUTE, SAVE, Decision
from ebb._policy.idle_rules import warn_of_composites
from ebb._policy.rule import Operator, Rule, check_decision, operator_name, qualified_name
from ebb._policy.text import loaded, parsed, to_toml
from ebb._support.private_files import write_private
from ebb._support.shown import shown

_numbers = itertools.count(1)
_by_number: weakref.WeakValueDictionary[str, Policy] = weakref.WeakValueDictionary()


def policy_of_number(number: str) -> Policy | None:
    """The policy with this `_number`, by which compiled graphs refer to it; None if it is gone."""
    return _by_number.get(number)


class Result(NamedTuple):
    """One output of a call."""

    nbytes: int
    dtype: torch.dtype


class Decider:
    """Makes one region's decisions for torch's selective checkpointing and for compiled graphs.
    Counts calls for rules with ``every`` and ``nth``."""

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


@functools.cache
def _warn_conditions() -> None:
    warnings.warn(
        "ebb: Policy.to_sac: torch's selective checkpointing sees no module names, value names, "
        "sizes and dtypes. Rules with module=, name=, per_module=, min_bytes=, max_bytes= or "
        "dtype= never match there.",
        stacklevel=3,
    )


def _is_known_to_torch(rule: Rule) -> bool:
    unknown = (rule.module, rule.name, rule.max_bytes, rule.dtype)
    if rule.min_bytes or rule.per_module or any(value is not None for value in unknown):
        _warn_conditions()
        return False
    return True


def _sac_context_fn(compiled: _C.Policy) -> Callable[..., Any]:
    """A ``context_fn`` with the decisions of a policy. If ebb takes the checkpoint call over, it
    uses the attribute ``compiled``: the Policy itself would be part of a reference cycle, which
    only the garbage collector frees."""

    def contexts() -> Any:
        rules = [rule for rule in rules_of(compiled) if _is_known_to_torch(rule)]
        default = Decision(compiled.fallback())
        forward, recompute = Decider(rules, default), Decider(rules, default)

        def decide(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            decider = recompute if context.is_recompute else forward
            [decision] = decider.decide(qualified_name(op), [None])
            # torch offloads only in compiled graphs, and has no pages
            saved = decision not in MADE_AGAIN
            return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(decide)  # type: ignore[no-untyped-call]

    contexts.compiled = compiled  # type: ignore[attr-defined]
    return contexts


class Policy:
    """An ordered list of rules and a default. The first rule that matches an op decides.

    Args:
        rules: a mapping from operators to decisions, in order, or a sequence of ``Rule``.
        default: the decision for operators that no rule matches.
        inputs: the decision for a region's input activations, that is inputs with a ``grad_fn``,
            such as the activations between blocks: SAVE, OFFLOAD or PAGE. PAGE affects only inputs
            that ``ebb.experimental.mark_rows`` has marked.

    Raises:
        TypeError: a decision or an operator has the wrong type.
        ValueError: a rule matches no registered operator; the message gives the nearest names. Or
            the conditions of a rule exclude each other. Or a rule has ``force`` and a glob, or has
            ``force`` for a collective that replays cannot repeat, or has ``force`` and
            RECOMPUTE_EACH_TIME for any collective. Or ``inputs`` is RECOMPUTE or
            RECOMPUTE_EACH_TIME. Or there are more than 5,000 rules, or more than 64 match one
            operator.

    Examples:
        >>> policy = ebb.Policy({"aten::mm": ebb.SAVE, "aten::_scaled_dot_product_*": ebb.SAVE})
        >>> policy.default.name
        'RECOMPUTE'
    """

    __module__ = "ebb"  # the name for users and pickles

    def __init__(
        self,
        rules: Mapping[Any, Decision] | Iterable[Rule] = (),
        default: Decision = RECOMPUTE,
        inputs: Decision = SAVE,
    ) -> None:
        if isinstance(rules, Mapping):
            rules = [Rule(op, decision) for op, decision in rules.items()]
        if not isinstance(rules, Iterable):
            raise TypeError(
                f"ebb: rules must be a mapping or a sequence of ebb.Rule; got {shown(rules)}"
            )
        given = list(rules)
        for rule in given:
            if not isinstance(rule, Rule):
                raise TypeError(
                    f"ebb: rules must be a mapping or a sequence of ebb.Rule; one entry is "
                    f"{shown(rule)}"
                )
        warn_of_composites(given)
        check_decision(default, "default")
        self._take(compiled_rules(given, default, check_decision(inputs, "inputs")))

    @classmethod
    def _from_compiled(cls, compiled: _C.Policy) -> Policy:
        policy = cls.__new__(cls)
        policy._take(compiled)
        return policy

    @classmethod
    def _from_rules(cls, rules: tuple[Rule, ...], default: Decision, inputs: Decision) -> Policy:
        return cls._from_compiled(compiled_rules(rules, default, inputs, late=True))

    def _take(self, compiled: _C.Policy) -> None:
        self._compiled = compiled
        # made here, because Dynamo cannot trace its construction
        self._sac_context_fn = _sac_context_fn(compiled)
        self._number = str(next(_numbers))  # a str: Dynamo may replace an int by a symbol
        _by_number[self._number] = self

    @functools.cached_property
    def _roots(self) -> weakref.WeakSet[Any]:
        """Models against which the rules with ``module=`` have been checked."""
        return weakref.WeakSet()

    @functools.cached_property
    def _offloads(self) -> bool:
        return self._compiled.gives(int(OFFLOAD))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Policy:
        """Read a policy from a TOML file. docs/reference/files.md describes the keys.

        Raises:
            OSError: the file cannot be read.
            ValueError: the file is not TOML, or does not describe a policy. The message names the
                file, the line or the key's path, and the nearest valid name.
        """
        return cls._from_compiled(loaded(path))

    def to_sac(self) -> Callable[[], Any]:
        """Convert the policy for torch's selective checkpointing, also under torch.compile.

        OFFLOAD and PAGE mean SAVE there, RECOMPUTE_EACH_TIME means RECOMPUTE. Rules with ``every``
        and ``nth`` count calls per checkpointed function. Rules with conditions on modules, names,
        sizes or dtypes match nothing, and ebb warns once.

        Returns:
            A ``context_fn`` for ``torch.utils.checkpoint.checkpoint(..., use_reentrant=False)``.

        Examples:
            >>> from torch.utils.checkpoint import checkpoint
            >>> sac = ebb.policies.save_matmuls.to_sac()
            >>> x = torch.ones(3, requires_grad=True)
            >>> checkpoint(torch.sin, x, use_reentrant=False, context_fn=sac).sum().backward()
        """
        return self._sac_context_fn

    def to_toml(self) -> str:
        """Return the text of the file that ``save`` writes."""
        return to_toml(self.rules, self.default, self.inputs)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the policy as TOML that ``load`` reads.

        Raises:
            OSError: the file cannot be written.
        """
        write_private(path, self.to_toml())

    @classmethod
    def parse(cls, text: str) -> Policy:
        """Read a policy from one line: operators and decisions, the name of a preset, or both.

        Args:
            text: rules in order, such as ``"mm:save,gelu:recompute,default:save"``. torch's own
                operators need no ``aten::``. ``default`` and ``inputs`` are as for ``Policy``.
                A preset, as in ``"save_matmuls,mm:recompute"``, adds its rules after these, and its
                default.

        Raises:
            TypeError: ``text`` is not a string.
            ValueError: ``text`` does not describe a policy.

        Examples:
            >>> ebb.Policy.parse("mm:save,*norm*:recompute").rules[0]
            ebb.Rule('aten::mm', ebb.SAVE)
        """
        if not isinstance(text, str):
            raise TypeError(f"ebb: a policy's text must be a str; got {type(text).__name__}")
        return cls._from_compiled(parsed(text))

    def explain(self, op: Operator) -> str:
        """Describe the rules that may match an operator, in the order in which ebb tries them.

        Args:
            op: as in ``Rule``; each operator that it matches is described.

        Raises:
            TypeError: ``op`` has the wrong type.
            ValueError: no registered operator matches; the message gives the nearest names.

        Examples:
            >>> policy = ebb.Policy([ebb.Rule("aten::mm", ebb.SAVE, module="*.mlp.*")])
            >>> print(policy.explain("aten::mm.default"))
            aten::mm.default
              SAVE by rule 0, 'aten::mm', in modules that match '*.mlp.*'
              RECOMPUTE by default
        """
        return self._compiled.explain(operator_name(op))

    @property
    def rules(self) -> tuple[Rule, ...]:
        """The rules, in order, with operator names as ``namespace::name``."""
        return rules_of(self._compiled)

    @property
    def default(self) -> Decision:
        """The decision for operators that no rule matches."""
        return Decision(self._compiled.fallback())

    @property
    def inputs(self) -> Decision:
        """The decision for a region's inputs that have a ``grad_fn``."""
        return Decision(self._compiled.inputs())

    def __repr__(self) -> str:
        inputs = "" if self.inputs is SAVE else f", inputs=ebb.{self.inputs.name}"
        return f"ebb.Policy({list(self.rules)!r}, default=ebb.{self.default.name}{inputs})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Policy):
            return NotImplemented
        return self._key() == other._key()

    def _key(self) -> tuple[tuple[Rule, ...], Decision, Decision]:
        return (self.rules, self.default, self.inputs)

    def __hash__(self) -> int:
        return hash(self._key())

    def __reduce__(self) -> tuple[Any, ...]:
        return (Policy._from_rules, self._key())
