"""The equivalent of a policy for torch's selective activation checkpointing."""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from ebb._decision import OFFLOAD, SAVE

if TYPE_CHECKING:
    from ebb._policy import Policy


def qualified_name(op: Any) -> str:
    """An OpOverload's name with the overload spelt out, such as ``aten::mm.default``."""
    name = str(op.name())
    return name if "." in name else name + ".default"


def sac_context_fn(policy: Policy) -> Callable[..., Any]:
    """A ``context_fn`` for torch.utils.checkpoint that decides as ``policy`` does.

    Rules with ``every`` count calls per checkpointed function, as ebb counts them per region.
    """

    def contexts() -> Any:
        calls: dict[tuple[bool, int], int] = {}

        def decide(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            name = qualified_name(op)
            decision = policy.default
            for index, rule in enumerate(policy.rules):
                pattern = str(rule.op)
                base = name.rsplit(".", 1)[0]
                if not (fnmatchcase(base, pattern) or fnmatchcase(name, pattern)):
                    continue
                key = (bool(context.is_recompute), index)
                calls[key] = calls.get(key, 0) + 1
                if calls[key] % rule.every == 0:
                    decision = rule.decision
                    break
            if decision in (SAVE, OFFLOAD):  # torch's own offload exists in compiled graphs only
                return CheckpointPolicy.MUST_SAVE
            return CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(decide)  # type: ignore[no-untyped-call]

    return contexts
