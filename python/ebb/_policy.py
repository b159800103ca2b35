"""Policies: which decision each operator gets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from ebb import _C
from ebb._decision import RECOMPUTE, SAVE, Decision
from ebb._sac import qualified_name, sac_context_fn

Operator: TypeAlias = "str | torch._ops.OpOverload | torch._ops.OpOverloadPacket"


def _operator_name(op: object) -> str:
    if isinstance(op, torch._ops.OpOverload):
        return qualified_name(op)
    if isinstance(op, torch._ops.OpOverloadPacket):
        return str(op._qualified_op_name)
    if isinstance(op, str):
        return op
    raise TypeError(
        f"ebb: an operator is a string such as 'aten::mm', an OpOverload such as "
        f"torch.ops.aten.mm.default, or an OpOverloadPacket such as torch.ops.aten.mm; "
        f"got {op!r} of type {type(op).__name__}"
    )


def _check_decision(decision: object, where: str) -> Decision:
    if isinstance(decision, Decision):
        return decision
    raise TypeError(
        f"ebb: {where} must be ebb.SAVE, ebb.RECOMPUTE, ebb.OFFLOAD or ebb.PAGE; "
        f"got {decision!r} of type {type(decision).__name__}"
    )


@dataclass(frozen=True)
class Rule:
    """One line of a policy.

    Args:
        op: the operators it is about: ``"aten::mm"`` (all overloads), ``"aten::mm.default"``,
            ``"aten.mm.default"``, a glob such as ``"aten::_scaled_dot_product_*"``, an
            ``OpOverload`` or an ``OpOverloadPacket``.
        decision: what to do with their outputs.
        every: match only every n-th call of them, counted per region; the other calls go on to
            the rules below.
        force: also replay operators that are kept whatever the policy says, such as collectives.
            Every rank must then reach the same backward. ``op`` must not be a glob.

    Raises:
        TypeError: ``op``, ``decision``, ``every`` or ``force`` has the wrong type.
        ValueError: ``every`` is less than 1.
    """

    op: Operator
    decision: Decision
    every: int = 1
    force: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "op", _operator_name(self.op))
        _check_decision(self.decision, f"the decision for {self.op}")
        if isinstance(self.every, bool) or not isinstance(self.every, int):
            raise TypeError(f"ebb: every must be an int; got {self.every!r}")
        if self.every < 1:
            raise ValueError(f"ebb: every must be 1 or more; got {self.every}")
        if not isinstance(self.force, bool):
            raise TypeError(f"ebb: force must be a bool; got {self.force!r}")


class Policy:
    """An ordered list of rules, of which the first that matches an op decides, and a default.

    Args:
        rules: a mapping from operators to decisions, in order, or a sequence of :class:`Rule`.
        default: the decision for operators that no rule matches.
        inputs: the decision for what a region reads and another autograd function computed: the
            activations between blocks. SAVE or OFFLOAD.

    Raises:
        TypeError: a decision or an operator has the wrong type.
        ValueError: a rule matches no registered operator; the message gives the nearest names.
            Or ``inputs`` is neither SAVE nor OFFLOAD.
        NotImplementedError: a decision is PAGE, which is not built yet.

    Example:
        >>> policy = ebb.Policy({"aten::mm": ebb.SAVE, "aten::_scaled_dot_product_*": ebb.SAVE})
        >>> policy.default.name
        'RECOMPUTE'
    """

    def __init__(
        self,
        rules: Mapping[Any, Decision] | Iterable[Rule] = (),
        default: Decision = RECOMPUTE,
        inputs: Decision = SAVE,
    ) -> None:
        if isinstance(rules, Mapping):
            rules = [Rule(op, decision) for op, decision in rules.items()]
        checked = list(rules)
        for rule in checked:
            if not isinstance(rule, Rule):
                raise TypeError(
                    f"ebb: rules must be a mapping or a sequence of ebb.Rule; it holds {rule!r}"
                )
        self._compiled = _C.Policy(
            [(str(rule.op), int(rule.decision), rule.every, rule.force) for rule in checked],
            int(_check_decision(default, "default")),
            int(_check_decision(inputs, "inputs")),
        )
        self._sac_context_fn = sac_context_fn(self)  # made here: Dynamo cannot trace its making

    @classmethod
    def _from_compiled(cls, compiled: _C.Policy) -> Policy:
        policy = cls.__new__(cls)
        policy._compiled = compiled
        policy._sac_context_fn = sac_context_fn(policy)
        return policy

    @property
    def rules(self) -> tuple[Rule, ...]:
        """The rules, in order, with operator names spelt ``namespace::name``."""
        return tuple(
            Rule(op, Decision(decision), every, force)
            for op, decision, every, force in self._compiled.rules()
        )

    @property
    def default(self) -> Decision:
        """The decision for operators that no rule matches."""
        return Decision(self._compiled.fallback())

    @property
    def inputs(self) -> Decision:
        """The decision for what a region reads and another autograd function computed."""
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
        return (Policy, self._key())
