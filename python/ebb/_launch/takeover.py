"""Takes over a job's calls of torch.utils.checkpoint, and its modules by name."""

from __future__ import annotations

import atexit
import glob
from contextlib import ExitStack
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

from ebb._launch import checkpoint_calls, models
from ebb._launch.assignment import Assignment
from ebb._launch.budget import Budget
from ebb._launch.frameworks import takeover as frameworks
from ebb._launch.memory_limit import Limit
from ebb._launch.variables import warn_setting_ignored
from ebb._plan.apply.module_policies import ModulePolicies
from ebb._policy.policy import Policy
from ebb.policies import recompute_all

_undo = ExitStack()  # undoes the takeover


def install(
    policy: Policy,  # of modules, and of torch.utils.checkpoint's calls without one of their own
    text: str,  # the user's text for the policy
    patterns: tuple[str, ...],  # globs over module names
    *,
    finds_blocks: bool = False,  # True: blocks become regions, see Note [Blocks of a job]
    stay: bool = False,  # True: blocks stay regions in a job that calls torch.utils.checkpoint
) -> None:
    remove()
    assignment = Assignment(policy, f"EBB={text}", patterns)
    blocks = models.FoundBlocks(assignment, stay) if finds_blocks else None
    _take_over(assignment, blocks)
    if blocks is not None:
        blocks.start(_undo)


def install_modules(policies: ModulePolicies, text: str) -> None:
    """Take over from now on, with a policy for each module. Calls of torch.utils.checkpoint become
    regions that recompute everything."""
    remove()
    policies._settings.put(_undo)
    others = tuple((policy, tuple(map(glob.escape, names))) for policy, names in policies._groups())
    assignment = Assignment(recompute_all, f"EBB={text}", (), others)
    _take_over(assignment)


def install_budget(
    budget: int | float | Limit,  # bytes or a share; or a limit, see `SaveAll`
    text: str,  # the user's text for the budget
    patterns: tuple[str, ...],  # globs over names of modules to plan; empty: ebb finds the blocks
    # The policy of torch.utils.checkpoint calls outside planned modules, and the user's text for
    # it. Default: recompute everything, as torch does.
    calls: tuple[Policy, str] | None = None,
    file: str = "",  # absolute path of the file that keeps the plan; empty: none
) -> Budget:
    """Take over from now on, with a memory budget instead of policies for modules."""
    remove()
    policy, said = calls or (recompute_all, "")
    assignment = Assignment(policy, f"EBB={said}" if said else f"EBB_BUDGET={text}", ())
    planned = Budget(budget, text, patterns, assignment, file)
    assignment.blocks = planned.blocks
    _take_over(assignment, planned)
    planned.start(_undo)
    return planned


def _take_over(assignment: Assignment, blocks: models.ModelObserver | None = None) -> None:
    checkpoint_calls.take_over(assignment, _undo)
    frameworks.take_over(_undo)
    _watch_late_rules(assignment, _undo)
    models.take_over(assignment, _undo, blocks)


def remove() -> None:
    """Restore torch's own functions. Modules that are regions stay regions."""
    _undo.close()


def _watch_late_rules(assignment: Assignment, undo: ExitStack) -> None:
    """Report rules that match no operator, until `undo` is closed. ebb reports them after the first
    optimizer step, or at exit if ebb has taken something over, since a library that is imported
    late may register the operators until then."""
    policies = [policy._compiled for policy, _ in assignment.modules()]
    if not any(policy.unmatched() for policy in policies):
        return

    def warn(*_: Any, is_late: bool = False) -> None:
        hook.remove()
        atexit.unregister(at_exit)
        for message in dict.fromkeys(line for policy in policies for line in policy.unmatched()):
            warn_setting_ignored(f"ebb: {assignment.text}", message, is_late=is_late)

    def at_exit() -> None:
        if assignment.announced:
            warn(is_late=True)

    hook = register_optimizer_step_post_hook(warn)
    atexit.register(at_exit)
    undo.callback(hook.remove)
    undo.callback(atexit.unregister, at_exit)
