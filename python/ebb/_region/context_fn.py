"""Turns the ``context_fn`` of a checkpoint call into a policy."""

from __future__ import annotations

import functools
import inspect
import types
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import (
    SAC_IGNORED_OPS,
    CheckpointPolicy,
    SelectiveCheckpointContext,
    noop_context_fn,
)

from ebb import _C
from ebb._policy.decision import OFFLOAD, SAVE, Decision
from ebb._policy.policy import Policy
from ebb._policy.rule import Rule, checkpoint_name
from ebb._support.job import print_once
from ebb._support.shown import clipped

Key = tuple[Any, ...]

_MOST_RULES = 60  # for one operator
_TELLS_OUTPUT = "op_output" in inspect.signature(SelectiveCheckpointContext).parameters
_DECISIONS = {
    CheckpointPolicy.MUST_SAVE: SAVE,
    CheckpointPolicy.PREFER_SAVE: SAVE,
    CheckpointPolicy.MUST_CPU_OFFLOAD: OFFLOAD,
}
_NAMES = {SAVE: "SAVE by context_fn", OFFLOAD: "OFFLOAD by context_fn"}
# The policy of regions in which an `_AskingMode` is active.
_WHILE_ASKING = Policy([Rule("*", decision, name=name) for decision, name in _NAMES.items()])


class _AskingMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Calls a policy function for each op, as torch does in forward, and records its answers."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.function = function
        self.answers: dict[Any, list[Decision | None]] = {}

    def __torch_dispatch__(
        self, op: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = op(*args, **kwargs)
        if op in SAC_IGNORED_OPS:
            return result
        options = {"op_output": result} if _TELLS_OUTPUT else {}
        context = SelectiveCheckpointContext(is_recompute=False, **options)
        answer = self.function(context, op, *args, **kwargs)
        if isinstance(answer, bool):
            answer = CheckpointPolicy.MUST_SAVE if answer else CheckpointPolicy.PREFER_RECOMPUTE
        decision = _DECISIONS.get(answer) if isinstance(answer, CheckpointPolicy) else None
        self.answers.setdefault(op, []).append(decision)
        if decision in _NAMES:
            for leaf in tree_leaves(result):
                if isinstance(leaf, torch.Tensor):
                    checkpoint_name(leaf, _NAMES[decision])
        return result


def policy_of_answers(answers: dict[Any, list[Decision | None]]) -> Policy | None:
    """A policy that gives each call of an operator the function's answer for that call. An answer
    None adds no rule. None if the policy would have too many rules."""
    rules = []
    for op, decisions in answers.items():
        if len(set(decisions)) == 1:
            if decisions[0] is not None:
                rules.append(Rule(op, decisions[0]))
            continue
        before = 0  # rules for this op so far; `nth` does not count the calls that they match
        for call, decision in enumerate(decisions, start=1):
            if decision is not None:
                rules.append(Rule(op, decision, nth=call - before))
                before += 1
        if before > _MOST_RULES:
            return None
    return Policy(rules)


@functools.cache
def _warn_recompute_context() -> None:
    warnings.warn(
        "ebb: the recomputation context that a context_fn returned is ignored, because ebb "
        "does not call the checkpointed function again, but replays the operators that backward "
        "needs. If recomputation depends on that context, run the job without ebb (EBB_DISABLE=1).",
        stacklevel=5,
    )


def _listed(function: Any) -> list[Any] | None:
    """The list from which torch made a policy function; None for any other function."""
    if getattr(function, "__module__", "") != torch_checkpoint.__name__:
        return None
    ops = inspect.getclosurevars(function).nonlocals.get("policy_fn_or_list")
    return ops if isinstance(ops, list) else None


@contextmanager
def _ask(function: Any, known: dict[str, Policy], name: str) -> Iterator[None]:
    global _asked
    _asked += 1
    if _asked == _MANY:
        print_once(
            f"ebb: the context_fn of {clipped(name)} gives a new policy in each call, so each call "
            "is as slow as torch's selective checkpointing. Make the context_fn once, or give it "
            "arguments that are equal in each call"
        )
    with _AskingMode(function) as mode:
        yield
    policy = policy_of_answers(mode.answers)
    if policy is not None:
        known[name] = policy


_COMPOSABLE = "torch.distributed._composable"
_MANY = 1000  # calls whose policy function ebb asks before it says so
_asked = 0  # calls whose policy function ebb asked


@functools.lru_cache(100)
def _policies(_key: Key) -> dict[str, Policy]:
    """By region name, the policies that a context_fn's function gave; the caller adds to it."""
    return {}


def policy_of_call(
    default: Policy, context_fn: Any, name: str
) -> tuple[Policy, AbstractContextManager[Any]]:
    """The policy for one call of a checkpoint function in the region `name`, and the context to
    enter there. `default`: the policy without a `context_fn`."""
    if context_fn is noop_context_fn:
        return default, nullcontext()
    key = _key_of(context_fn)
    known = {} if key is None else _policies(key)
    if name in known:
        return known[name], nullcontext()
    compiled = getattr(context_fn, "compiled", None)
    if isinstance(compiled, _C.Policy):  # Policy.to_sac() made it
        known[name] = Policy._from_compiled(compiled)
        return known[name], nullcontext()
    forward, recompute = context_fn()
    if not torch.is_grad_enabled():
        return default, nullcontext()  # torch does not enter the context either
    if not isinstance(forward, torch_checkpoint._CachingTorchDispatchMode):
        # The context of torch.distributed._composable only disables a hook of its own.
        module = getattr(context_fn, "__module__", "")
        if not (isinstance(recompute, nullcontext) or module.startswith(_COMPOSABLE)):
            _warn_recompute_context()
        return default, forward
    function = forward.policy_fn
    ops = _listed(function)
    if ops is not None:
        listed = [Rule(op, SAVE) for op in ops if isinstance(op, torch._ops.OpOverload)]
        known[name] = Policy(listed)
        return known[name], nullcontext()
    return _WHILE_ASKING, _ask(function, known, name)


def forget() -> None:
    global _asked
    _asked = 0
    _policies.cache_clear()


_DEEPEST = 10  # nested arguments
_LONGEST = 1000  # parts of a key
_VALUES = (
    bool, int, float, complex, str, bytes, type(None),
    torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip


# Note [Keys of a context_fn]
# A key stands for a function and all that it was made with: its code and globals, the contents of
# its closure, its defaults, and the arguments of `functools.partial`. Two functions with equal keys
# give the same answers as long as they read no other state. Containers and plain values count by
# their contents at the time of the call, other objects by their identity. A key keeps no such
# object alive, and equals no other key after the object has been freed.
class _Same:
    """Equal to another only if both stand for one object that is alive."""

    def __init__(self, value: object) -> None:
        self._id = id(value)
        self._ref = weakref.ref(value)

    def __hash__(self) -> int:
        return hash(self._id)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Same):
            return False
        value = self._ref()
        return value is not None and value is other._ref()


def _key_of(context_fn: object) -> Key | None:
    """See Note [Keys of a context_fn]. None if the function cannot be told from others."""
    parts: list[Any] = []
    try:
        _add(context_fn, parts, _DEEPEST)
    except (TypeError, ValueError):  # no weak references; an empty cell of a closure; too large
        return None
    return tuple(parts)


def _add(value: Any, parts: list[Any], depth: int) -> None:
    kind = type(value)
    if depth == 0 or len(parts) > _LONGEST:
        raise ValueError("too large for a key")
    if kind in _VALUES:
        parts += [kind, repr(value) if kind in (float, complex) else value]  # 0.0 == -0.0
        return
    inner = _contents(value, kind)
    if inner is None:
        parts.append(_Same(value))
    else:
        parts += [kind, len(inner)]
        for part in inner:
            _add(part, parts, depth - 1)


def _contents(value: Any, kind: type) -> list[Any] | None:
    """The values that `value` consists of; None for an object that counts by its identity."""
    if kind in (list, tuple, set, frozenset, torch.Size):
        return list(value)
    if kind in (dict, defaultdict):
        factory = [value.default_factory] if kind is defaultdict else []
        return [*factory, *(part for item in value.items() for part in item)]
    if kind is functools.partial:
        return [value.func, value.args, value.keywords]
    if kind is types.MethodType:
        return [value.__func__, value.__self__]
    if kind is types.FunctionType and not value.__dict__:
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        made_in = id(value.__globals__)  # differs only if a program executes the code twice
        return [value.__code__, made_in, cells, value.__defaults__, value.__kwdefaults__]
    return None
