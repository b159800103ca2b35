"""Taking a job over: its calls of torch.utils.checkpoint, and its modules by their names."""

from __future__ import annotations

from contextlib import ExitStack

from ebb._launch import checkpoint_calls, models
from ebb._launch.taken import Taken
from ebb._policy.policy import Policy

_undo = ExitStack()  # of what was taken over


def install(policy: Policy, text: str, patterns: tuple[str, ...]) -> None:
    """Takes over from now on.

    Args:
        policy: for calls of torch.utils.checkpoint without a policy of their own, and for modules.
        text: what the user wrote for it.
        patterns: globs over names of modules.
    """
    remove()
    taken = Taken(policy, text, patterns)
    checkpoint_calls.take_over(taken, _undo)
    models.take_over(taken, _undo)


def remove() -> None:
    """Gives torch's functions their own code back. Modules that are regions stay so."""
    _undo.close()
