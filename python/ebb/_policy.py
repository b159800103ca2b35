"""Policies: which decision each operator gets."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, fields
from typing import Any, TypeAlias, cast

import torch
from torch.compiler import is_compiling

from ebb import _C
from ebb._decision import OFFLOAD, RECOMPUTE, SAVE, Decision
from ebb._sac import qualified_name, sac_context_fn
from ebb._sizes import Bytes, number_of_bytes
from ebb._subclasses import plain_tensors

_ANY_SIZE = 2**64 - 1

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


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"ebb: {name!r} is no dtype of torch, such as 'bfloat16'")
    return found


def _check_decision(decision: object, where: str) -> Decision:
    if isinstance(decision, Decision):
        return decision
    raise TypeError(
        f"ebb: {where} must be ebb.SAVE, ebb.RECOMPUTE, ebb.OFFLOAD or ebb.PAGE; "
        f"got {decision!r} of type {type(decision).__name__}"
    )


@dataclass(frozen=True, repr=False)
class Rule:
    """One line of a policy: it matches what an operator makes if all that it says holds.

    Args:
        op: the operators it is about: ``"aten::mm"`` (all overloads), ``"aten::mm.default"``,
            ``"aten.mm.default"``, a glob such as ``"aten::_scaled_dot_product_*"`` or ``"*"``, an
            ``OpOverload`` or an ``OpOverloadPacket``.
        decision: what to do with their outputs.
        every: match only every n-th call, counted per region; the other calls go on to the rules
            below. What counts is each call that comes to this rule in a matching module.
        force: also replay operators that are kept whatever the policy says, such as collectives.
            Every rank must then reach the same backward. ``op`` must not be a glob.
        nth: match only that call, from 1, counted likewise.
        per_module: count calls per module, not per region.
        module: a glob over the fully qualified name of the innermost module that runs, such as
            ``"*.mlp.*"``; ``*`` matches dots too. Wrappers' own names (torch.compile's, FSDP's, of
            checkpoint wrappers and PEFT's ``base_layer``) are left out. Modules are known under
            :func:`ebb.apply` and in ``ebb.region(policy, root=model)``.
        name: only values to which :func:`ebb.checkpoint_name` gave this name.
        min_bytes, max_bytes: only outputs whose storage has at least, or at most, so many bytes,
            as a number or text such as ``"1MiB"``.
        dtype: only outputs of this dtype, a ``torch.dtype`` or its name.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of range, or two exclude each other; checked in part when a
            policy is made of the rule.
    """

    op: Operator
    decision: Decision
    every: int = 1
    force: bool = False
    _: KW_ONLY
    nth: int | None = None
    per_module: bool = False
    module: str | None = None
    name: str | None = None
    min_bytes: Bytes = 0
    max_bytes: Bytes | None = None
    dtype: torch.dtype | str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "op", _operator_name(self.op))
        _check_decision(self.decision, f"the decision for {self.op}")
        for count in ("every", "nth"):
            value = getattr(self, count)
            if value is None and count == "nth":
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"ebb: {count} must be an int; got {value!r}")
            if not 1 <= value < 2**32:
                raise ValueError(f"ebb: {count} must be 1 or more; got {value}")
        for flag in ("force", "per_module"):
            if not isinstance(getattr(self, flag), bool):
                raise TypeError(f"ebb: {flag} must be a bool; got {getattr(self, flag)!r}")
        for text in ("module", "name"):
            value = getattr(self, text)
            if value is not None and not isinstance(value, str):
                raise TypeError(f"ebb: {text} must be a str; got {value!r}")
            if value == "":
                raise ValueError(f"ebb: {text} must not be empty; leave it out to match any")
        for size in ("min_bytes", "max_bytes"):
            if getattr(self, size) is not None:
                object.__setattr__(self, size, number_of_bytes(size, getattr(self, size)))
        if isinstance(self.dtype, str):
            object.__setattr__(self, "dtype", _dtype(self.dtype))
        elif self.dtype is not None and not isinstance(self.dtype, torch.dtype):
            raise TypeError(f"ebb: dtype must be a torch.dtype or its name; got {self.dtype!r}")

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
            _ANY_SIZE if self.max_bytes is None else int(self.max_bytes),
            cast("torch.dtype | None", self.dtype),
        )

    @classmethod
    def _from_compiled(cls, rule: _C.Rule) -> Rule:
        return cls(
            rule.op,
            Decision(rule.decision),
            rule.every,
            rule.force,
            nth=rule.nth or None,
            per_module=rule.per_module,
            module=rule.module or None,
            name=rule.name or None,
            min_bytes=rule.min_bytes,
            max_bytes=None if rule.max_bytes == _ANY_SIZE else rule.max_bytes,
            dtype=rule.dtype,
        )


class Policy:
    """An ordered list of rules, of which the first that matches an op decides, and a default.

    Args:
        rules: a mapping from operators to decisions, in order, or a sequence of :class:`Rule`.
        default: the decision for operators that no rule matches.
        inputs: the decision for what a region reads and another autograd function computed: the
            activations between blocks. SAVE, OFFLOAD, or PAGE for those
            that :func:`ebb.mark_rows` has marked.

    Raises:
        TypeError: a decision or an operator has the wrong type.
        ValueError: a rule matches no registered operator; the message gives the nearest names. Or
            the conditions of a rule exclude each other. Or ``inputs`` is RECOMPUTE.

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
            [rule._compile() for rule in checked],
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

    @functools.cached_property
    def _offloads(self) -> bool:
        return self._compiled.gives(int(OFFLOAD))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Policy:
        """Read a policy from a TOML file, whose keys docs/policies.md describes.

        Args:
            path: the file.

        Raises:
            OSError: the file cannot be read.
            ValueError: it is no TOML, or says something that is no policy. The message tells the
                file, the line or the key's path, and the nearest valid name.
        """
        from ebb import _policy_text

        return _policy_text.load(path)

    def to_sac(self) -> Callable[[], Any]:
        """The policy for torch's selective activation checkpointing, also under torch.compile.

        OFFLOAD and PAGE mean SAVE there. Rules with ``every`` and ``nth`` count calls per
        checkpointed function. Rules that ask for modules, names, sizes or dtypes match nothing, and
        a warning says so once.

        Returns:
            A ``context_fn`` for ``torch.utils.checkpoint.checkpoint(..., use_reentrant=False)``.

        Example:
            >>> from torch.utils.checkpoint import checkpoint
            >>> sac = ebb.policies.save_matmuls.to_sac()
            >>> x = torch.ones(3, requires_grad=True)
            >>> checkpoint(torch.sin, x, use_reentrant=False, context_fn=sac).sum().backward()
        """
        return self._sac_context_fn

    def dump(self, path: str | os.PathLike[str] | None = None) -> str:
        """Write the policy as TOML, which :meth:`load` reads.

        Args:
            path: the file to write; None for none.

        Returns:
            The text.

        Raises:
            OSError: the file cannot be written.
        """
        from ebb import _policy_text

        text = _policy_text.to_toml(self)
        if path is not None:
            with open(path, "w", encoding="utf-8") as file:
                file.write(text)
        return text

    @classmethod
    def parse(cls, text: str) -> Policy:
        """Read a policy from one line: operators and decisions, or the name of a preset.

        Args:
            text: such as ``"mm:save,gelu:recompute,default:save"``, in order. torch's own operators
                need no ``aten::``. ``default`` and ``inputs`` are as for :class:`Policy`.

        Raises:
            TypeError: ``text`` is no string.
            ValueError: it says something that is no policy.

        Example:
            >>> ebb.Policy.parse("mm:save,*norm*:recompute").rules[0]
            ebb.Rule('aten::mm', ebb.SAVE)
        """
        from ebb import _policy_text

        if not isinstance(text, str):
            raise TypeError(f"ebb: a policy's text must be a str; got {type(text).__name__}")
        return _policy_text.parse(text)

    def explain(self, op: Operator) -> str:
        """Tells in words which rules may decide on an operator, in the order they are asked.

        Args:
            op: as in :class:`Rule`; each operator that it matches is told of.

        Raises:
            TypeError: ``op`` has the wrong type.
            ValueError: no registered operator matches; the message gives the nearest names.

        Example:
            >>> policy = ebb.Policy([ebb.Rule("aten::mm", ebb.SAVE, module="*.mlp.*")])
            >>> print(policy.explain("aten::mm.default"))
            aten::mm.default
              SAVE by rule 0, 'aten::mm', in a module '*.mlp.*'
              RECOMPUTE by default
        """
        return self._compiled.explain(_operator_name(op))

    @property
    def rules(self) -> tuple[Rule, ...]:
        """The rules, in order, with operator names spelt ``namespace::name``."""
        return tuple(map(Rule._from_compiled, self._compiled.rules()))

    @property
    def default(self) -> Decision:
        """The decision for operators that no rule matches."""
        return self._parts()[-1][1]

    @property
    def inputs(self) -> Decision:
        """The decision for what a region reads and another autograd function computed."""
        return Decision(self._compiled.inputs())

    def _parts(self) -> tuple[tuple[tuple[Rule, ...], Decision], ...]:
        """Rules and default of each policy that :func:`ebb.policies.either` made one of."""
        ends = [end for end, _ in self._compiled.parts()]
        rules = self.rules
        return tuple(
            (rules[start:end], Decision(default))
            for start, (end, default) in zip([0, *ends], self._compiled.parts(), strict=False)
        )

    def __repr__(self) -> str:
        inputs = "" if self.inputs is SAVE else f", inputs=ebb.{self.inputs.name}"
        parts = [
            f"ebb.Policy({list(rules)!r}, default=ebb.{default.name}{inputs})"
            for rules, default in self._parts()
        ]
        return parts[0] if len(parts) == 1 else f"ebb.policies.either({', '.join(parts)})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Policy):
            return NotImplemented
        return self._key() == other._key()

    def _key(self) -> tuple[Any, Decision]:
        return (self._parts(), self.inputs)

    def __hash__(self) -> int:
        return hash(self._key())

    def __reduce__(self) -> tuple[Any, ...]:
        return (from_parts, self._key())


def from_parts(parts: tuple[tuple[tuple[Rule, ...], Decision], ...], inputs: Decision) -> Policy:
    policies = [Policy(rules, default, inputs)._compiled for rules, default in parts]
    return Policy._from_compiled(functools.reduce(_C.either, policies))


def checkpoint_name(x: torch.Tensor, name: str) -> torch.Tensor:
    """Give a tensor a name, for rules with ``name=``, as JAX's function of this name does.

    Outside of regions, for tensors that no region computed and under ``torch.compile`` it does
    nothing. A rule above the one that asks for the name still decides if it matched when the tensor
    was made.

    Args:
        x: a tensor of any shape.
        name: its name.

    Returns:
        ``x`` itself.

    Raises:
        TypeError: an argument has the wrong type.

    Example:
        >>> policy = ebb.policies.save_only_these_names("attn_out")
        >>> with ebb.region(policy):
        ...     h = ebb.checkpoint_name(torch.ones(2, requires_grad=True).exp(), "attn_out")
    """
    if is_compiling():
        return x
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"ebb: checkpoint_name names a tensor; got {type(x).__name__}")
    if not isinstance(name, str):
        raise TypeError(f"ebb: a name must be a str; got {name!r}")
    for inner in plain_tensors(x):
        _C.name_value(inner, name)
    return x
