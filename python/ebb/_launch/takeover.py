"""Taking a job over: its calls of torch.utils.checkpoint, and its modules by their names."""

from __future__ import annotations

import glob
from contextlib import ExitStack

from ebb._launch import checkpoint_calls, late_rules, models
from ebb._launch.budget import Budget
from ebb._launch.found_blocks import FoundBlocks
from ebb._launch.room import Room
from ebb._launch.taken import Taken
from ebb._plan.memory_limit import Limit
from ebb._plan.module_policies import ModulePolicies
from ebb._policy.policy import Policy
from ebb.policies import recompute_all

_undo = ExitStack()  # of what was taken over


def install(
    policy: Policy,
    text: str,
    patterns: tuple[str, ...],
    *,
    finds_blocks: bool = False,
    stay: bool = False,
) -> None:
    """Takes over from now on.

    Args:
        policy: for calls of torch.utils.checkpoint without a policy of their own, and for modules.
        text: what the user wrote for it.
        patterns: globs over names of modules.
        finds_blocks: the blocks of models become regions, see Note [Blocks of a job].
        stay: they are regions in a job that calls torch.utils.checkpoint, too.
    """
    remove()
    taken = Taken(policy, f"EBB={text}", patterns)
    checkpoint_calls.take_over(taken, _undo)
    late_rules.watch(taken, _undo)
    blocks = FoundBlocks(taken, stay) if finds_blocks else None
    models.take_over(taken, _undo, blocks)
    if blocks is not None:
        blocks.start(_undo)


def install_modules(policies: ModulePolicies, text: str) -> None:
    """Takes over from now on, with a policy for each module. Calls of torch.utils.checkpoint are
    regions in which all is recomputed.

    Args:
        policies: of modules, by name.
        text: what the user wrote for it.
    """
    remove()
    policies.settings.put(_undo)
    others = tuple((policy, tuple(map(glob.escape, names))) for policy, names in policies.groups())
    taken = Taken(recompute_all, f"EBB={text}", (), others)
    checkpoint_calls.take_over(taken, _undo)
    late_rules.watch(taken, _undo)
    models.take_over(taken, _undo)


def install_budget(
    budget: int | float | Limit,
    text: str,
    patterns: tuple[str, ...],
    calls: tuple[Policy, str] | None = None,
) -> Budget:
    """Takes over from now on; modules have a budget, and no policy is given for them.

    Args:
        budget: bytes or a share; or a limit: everything is kept while there is room, see
            :class:`Room`.
        text: what the user wrote for it.
        patterns: globs over names of modules that are planned; none: they are found.
        calls: the policy of calls of torch.utils.checkpoint that are not in a module which is
            planned, and what the user wrote for it. Default: all is recomputed, as by torch.
    """
    remove()
    policy, said = calls or (recompute_all, "")
    taken = Taken(policy, f"EBB={said}" if said else f"EBB_BUDGET={text}", ())
    planned: Budget
    if isinstance(budget, Limit):
        planned = Room(budget, text, patterns, taken)
    else:
        planned = Budget(budget, text, patterns, taken)
    taken.in_call = planned.checkpoint_call
    checkpoint_calls.take_over(taken, _undo)
    late_rules.watch(taken, _undo)
    models.take_over(taken, _undo, planned)
    planned.start(_undo)
    return planned


def remove() -> None:
    """Gives torch's functions their own code back. Modules that are regions stay so."""
    _undo.close()
