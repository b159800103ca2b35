"""Converts a policy for torch's selective activation checkpointing."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from ebb._policy.decider import Decider
from ebb._policy.decision import MADE_AGAIN
from ebb._policy.operators import qualified_name
from ebb._policy.rule import Rule


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


def sac_context_fn(policy: Any) -> Callable[..., Any]:
    """A ``context_fn`` for torch.utils.checkpoint with the decisions of a policy.

    Rules with ``every`` and ``nth`` count calls per checkpointed function, not per region. If ebb
    takes the checkpoint call over, it uses the policy itself.
    """

    def contexts() -> Any:
        parts = [
            (tuple(rule for rule in rules if _is_known_to_torch(rule)), default)
            for rules, default in policy._parts()
        ]
        forward, recompute = Decider(parts), Decider(parts)

        def decide(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            decider = recompute if context.is_recompute else forward
            [decision] = decider.decide(qualified_name(op), [None])
            # torch offloads only in compiled graphs, and has no pages
            saved = decision not in MADE_AGAIN
            return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(decide)  # type: ignore[no-untyped-call]

    contexts.policy = policy  # type: ignore[attr-defined]
    return contexts
