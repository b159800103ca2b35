"""Checks rules about operators of libraries that a job imports after ebb."""

from __future__ import annotations

import atexit
from contextlib import ExitStack
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

from ebb._launch.assignment import Assignment
from ebb._launch.variables import say_ignored


def watch(assignment: Assignment, undo: ExitStack) -> None:
    """Report rules that match no operator, after the first optimizer step, or at exit if ebb has
    taken something over. Stop when `undo` is closed.

    Raises:
        ValueError: EBB_STRICT is set; raised in the optimizer's step.
    """
    policies = [policy._compiled for policy, _ in assignment.modules()]
    if not any(policy.unmatched() for policy in policies):
        return

    def tell(*_: Any) -> None:
        hook.remove()
        atexit.unregister(at_exit)
        for message in dict.fromkeys(line for policy in policies for line in policy.unmatched()):
            say_ignored(f"ebb: {assignment.text}", message)

    def at_exit() -> None:
        if assignment.announced:
            tell()

    hook = register_optimizer_step_post_hook(tell)
    atexit.register(at_exit)
    undo.callback(hook.remove)
    undo.callback(atexit.unregister, at_exit)
