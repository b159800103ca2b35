"""Converts policies of torch's selective activation checkpointing to policies of ebb."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import SAC_IGNORED_OPS, CheckpointPolicy, SelectiveCheckpointContext

from ebb._policy.checkpoint_name import checkpoint_name
from ebb._policy.decision import OFFLOAD, SAVE, Decision
from ebb._policy.policy import Policy
from ebb._policy.rule import Rule

_MOST_RULES = 60  # for one operator
_TELLS_OUTPUT = "op_output" in inspect.signature(SelectiveCheckpointContext).parameters
_DECISIONS = {
    CheckpointPolicy.MUST_SAVE: SAVE,
    CheckpointPolicy.PREFER_SAVE: SAVE,
    CheckpointPolicy.MUST_CPU_OFFLOAD: OFFLOAD,
}
_NAMES = {SAVE: "SAVE by context_fn", OFFLOAD: "OFFLOAD by context_fn"}


class AskingMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
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
    """Returns a policy that gives each call of an operator the function's answer for that call. An
    answer None adds no rule. Returns None if the policy would have too many rules.
    """
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


def policy_of_list(ops: list[Any]) -> Policy:
    """The policy that torch derives from a list of ops to save."""
    return Policy([Rule(op, SAVE) for op in ops if isinstance(op, torch._ops.OpOverload)])


ASKED = Policy([Rule("*", decision, name=name) for decision, name in _NAMES.items()])
"""For regions in which an :class:`AskingMode` is active."""
