"""Rules, the lines of a policy; the names by which users give operators; names for values."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, fields
from typing import Any, ClassVar, TypeAlias, cast

import torch
from torch.compiler import is_compiling

from ebb import _C
from ebb._policy.decision import Decision
from ebb._support.shown import as_utf8, checked_name, shown
from ebb._support.sizes import Bytes, number_of_bytes, whole_number
from ebb._support.subclasses import plain_tensors

ANY_SIZE = 2**64 - 1

Operator: TypeAlias = "str | torch._ops.OpOverload | torch._ops.OpOverloadPacket"


def qualified_name(op: Any) -> str:
    """An OpOverload's name with its overload, such as ``aten::mm.default``."""
    name = str(op.name())
    return name if "." in name else name + ".default"


def operator_name(op: object) -> str:
    """The operator's name in C++. Raises TypeError if `op` is no operator."""
    if isinstance(op, torch._ops.OpOverload):
        return qualified_name(op)
    if isinstance(op, torch._ops.OpOverloadPacket):
        return str(op._qualified_op_name)
    if isinstance(op, str):
        return checked_name("an operator's name", op)
    raise TypeError(
        f"ebb: an operator is a string such as 'aten::mm', an OpOverload such as "
        f"torch.ops.aten.mm.default, or an OpOverloadPacket such as torch.ops.aten.mm; "
        f"got {shown(op)} of type {type(op).__name__}"
    )


def _dtype(name: str) -> torch.dtype:
    found = vars(torch).get(name.removeprefix("torch."))
    if not isinstance(found, torch.dtype):
        raise ValueError(f"ebb: unknown dtype {shown(name)}; use a name such as 'bfloat16'")
    return found


def check_decision(decision: object, where: str) -> Decision:
    """Returns `decision` if it is a Decision, else raises TypeError; `where` names its use."""
    if isinstance(decision, Decision):
        return decision
    raise TypeError(
        f"ebb: {where} must be ebb.SAVE, ebb.RECOMPUTE, ebb.RECOMPUTE_EACH_TIME, "
        f"ebb.OFFLOAD or ebb.PAGE; "
        f"got {shown(decision)} of type {type(decision).__name__}"
    )


@dataclass(frozen=True, repr=False)
class Rule:
    """One entry of a policy. A rule matches an operator's output if all its conditions hold.

    Args:
        op: the operators that the rule matches: ``"aten::mm"`` (all overloads),
            ``"aten::mm.default"``, ``"aten.mm.default"``, a glob such as
            ``"aten::_scaled_dot_product_*"`` or ``"*"``, an ``OpOverload`` or an
            ``OpOverloadPacket``.
        decision: what to do with the operators' outputs.
        every: match only every n-th call, counted per region; later rules decide on the other
            calls. A call is counted if its module matches, and no earlier rule without a condition
            on the output has matched.
        force: also recompute an operator that ebb otherwise always keeps, such as one with packed
            weights. ``op`` must not be a glob, nor a collective that replays cannot repeat. For
            other collectives, all ranks must have the rule. Conditions on the output (``name``,
            sizes, ``dtype``) are not allowed.
        nth: match only the n-th call, from 1, counted as for ``every``.
        per_module: count calls per module, not per region.
        module: a glob over the fully qualified name of the innermost running module, such as
            ``"*.mlp.*"``; ``*`` matches dots too. The parts that wrappers add to names
            (torch.compile, DDP, FSDP, checkpoint wrappers, PEFT's ``base_layer``) are left out. ebb
            knows the modules under ``ebb.apply`` and in ``ebb.region(policy, root=model)``.
        name: match only values to which ``ebb.checkpoint_name`` gave this name.
        min_bytes, max_bytes: match only outputs whose storage has at least, or at most, this many
            bytes, as a number or text such as ``"1MiB"``.
        dtype: match only outputs of this dtype, a ``torch.dtype`` or its name.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of range, or two exclude each other. ``Policy`` checks
            some of this.

    Examples:
        >>> rules = [
        ...     ebb.Rule("aten::mm", ebb.SAVE, module="*.mlp.*", every=2),
        ...     ebb.Rule("*", ebb.OFFLOAD, min_bytes="16MiB", dtype="bfloat16"),
        ... ]
        >>> policy = ebb.Policy(rules, default=ebb.RECOMPUTE)
    """

    op: Operator
    decision: Decision
    _: KW_ONLY
    every: int = 1
    force: bool = False
    nth: int | None = None
    per_module: bool = False
    module: str | None = None
    name: str | None = None
    min_bytes: Bytes = 0
    max_bytes: Bytes | None = None
    dtype: torch.dtype | str | None = None

    # True for a rule of a preset: the user did not write the rule, so ebb does not warn if the rule
    # has no effect. Not a field, because rules with the same decisions are equal.
    _is_of_preset: ClassVar[bool] = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "op", operator_name(self.op))
        check_decision(self.decision, f"the decision for {self.op}")
        for count in ("every", "nth"):
            if count == "every" or self.nth is not None:
                whole_number(count, getattr(self, count), least=1, most=2**32 - 1)
        for flag in ("force", "per_module"):
            if not isinstance(getattr(self, flag), bool):
                raise TypeError(f"ebb: {flag} must be a bool; got {shown(getattr(self, flag))}")
        for text in ("module", "name"):
            value = getattr(self, text)
            if value is not None and not isinstance(value, str):
                raise TypeError(f"ebb: {text} must be a str; got {shown(value)}")
            if value == "":
                raise ValueError(f"ebb: {text} must not be empty; leave it out to match any")
            if value is not None:
                object.__setattr__(self, text, checked_name(text, value))
        for size in ("min_bytes", "max_bytes"):
            if getattr(self, size) is not None:
                object.__setattr__(self, size, number_of_bytes(size, getattr(self, size)))
        if isinstance(self.dtype, str):
            object.__setattr__(self, "dtype", _dtype(self.dtype))
        elif self.dtype is not None and not isinstance(self.dtype, torch.dtype):
            raise TypeError(
                f"ebb: dtype must be a torch.dtype or its name; got {shown(self.dtype)}"
            )

    def __repr__(self) -> str:
        given = [
            f"{field.name}={getattr(self, field.name)!r}"
            for field in fields(self)[2:]
            if getattr(self, field.name) != field.default
        ]
        return f"ebb.Rule({', '.join([repr(self.op), f'ebb.{self.decision.name}', *given])})"

    def _compile(self) -> _C.Rule:
        return _C.Rule(
            str(self.op),
            int(self.decision),
            self.every,
            self.force,
            self.nth or 0,
            self.per_module,
            self.module or "",
            self.name or "",
            int(self.min_bytes),
            ANY_SIZE if self.max_bytes is None else int(self.max_bytes),
            cast("torch.dtype | None", self.dtype),
            self._is_of_preset,
        )

    def _as_of_preset(self) -> Rule:
        object.__setattr__(self, "_is_of_preset", True)
        return self

    @classmethod
    def _from_compiled(cls, rule: _C.Rule) -> Rule:
        made = cls(
            rule.op,
            Decision(rule.decision),
            every=rule.every,
            force=rule.force,
            nth=rule.nth or None,
            per_module=rule.per_module,
            module=rule.module or None,
            name=rule.name or None,
            min_bytes=rule.min_bytes,
            max_bytes=None if rule.max_bytes == ANY_SIZE else rule.max_bytes,
            dtype=rule.dtype,
        )
        return made._as_of_preset() if rule.preset else made


Rule.__module__ = "ebb"  # the name for users and pickles


def checkpoint_name(x: torch.Tensor, name: str) -> torch.Tensor:
    """Give a tensor a name for rules with ``name=``, as JAX's ``checkpoint_name`` does.

    checkpoint_name does nothing outside of regions, for tensors that no region computed, and under
    ``torch.compile``. The decision made when the tensor was computed stays if its rule comes before
    the rule with the name.

    Args:
        x: a tensor of any shape.
        name: its name.

    Returns:
        ``x`` itself.

    Raises:
        TypeError: an argument has the wrong type.

    Examples:
        >>> policy = ebb.policies.save_only_these_names("attn_out")
        >>> with ebb.region(policy):
        ...     h = ebb.checkpoint_name(torch.ones(2, requires_grad=True).exp(), "attn_out")
    """
    if is_compiling():
        return x
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"ebb: checkpoint_name: x must be a tensor; got {type(x).__name__}")
    if not isinstance(name, str):
        raise TypeError(f"ebb: checkpoint_name: name must be a str; got {shown(name)}")
    for inner in plain_tensors(x):
        _C.name_value(inner, as_utf8(name))
    return x
