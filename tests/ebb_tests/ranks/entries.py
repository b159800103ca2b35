"""The ways in which a job's blocks become regions, as a strategy's test uses them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from fnmatch import fnmatch
from typing import Any

import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.utils.checkpoint import checkpoint

import ebb
from ebb._launch import takeover
from ebb_tests.ranks.models import STEPS

PLANNED_STEPS = 18  # more than ebb measures for a budget


def blocks_of(model: torch.nn.Module, modules: str) -> list[torch.nn.Module]:
    depth = modules.count(".")
    return [
        block
        for name, block in model.named_modules()
        if fnmatch(name, modules) and name.count(".") == depth
    ]


def replace_forward(block: torch.nn.Module, call: Callable[..., Any]) -> None:
    block.forward = functools.partial(call, block.forward)  # type: ignore[method-assign]


def with_blocks(model: torch.nn.Module, policy: ebb.Policy, modules: str) -> None:
    def call(forward: Callable[..., Any], *inputs: Any) -> Any:
        with ebb.region(policy):
            return forward(*inputs)

    for block in blocks_of(model, modules):
        replace_forward(block, call)


def calls_of_checkpoint(model: torch.nn.Module, policy: ebb.Policy, modules: str) -> None:
    takeover.install(policy, "policy", ())
    for block in blocks_of(model, modules):
        replace_forward(block, functools.partial(checkpoint, use_reentrant=False))


def checkpoint_wrappers(model: torch.nn.Module, policy: ebb.Policy, modules: str) -> None:
    takeover.install(policy, "policy", ())
    blocks = blocks_of(model, modules)
    apply_activation_checkpointing(model, check_fn=lambda module: module in blocks)


def names_of_modules(model: torch.nn.Module, policy: ebb.Policy, modules: str) -> None:
    takeover.install(policy, "policy", (modules,))


def budget(model: torch.nn.Module, policy: ebb.Policy, modules: str) -> None:
    takeover.install_budget(0.7, "70%", ())


def apply(model: torch.nn.Module, policy: ebb.Policy, modules: str) -> None:
    ebb.apply(model, policy, modules)


# For each way to make blocks regions: the function to call before the strategy wraps the model.
# "apply later" has none, since it calls `ebb.apply` on the wrapped model.
ENTRIES: dict[str, Callable[[torch.nn.Module, ebb.Policy, str], None] | None] = {
    "apply": apply,
    "apply later": None,
    "with-blocks": with_blocks,
    "EBB, checkpoint": calls_of_checkpoint,
    "EBB, checkpoint_wrapper": checkpoint_wrappers,
    "EBB_MODULES": names_of_modules,
    "EBB_BUDGET": budget,
}


class Way:
    """How a training runs: under a policy by one entry, or plain, where all of this does nothing.

    Attributes:
        steps: the number of steps that a training takes.
    """

    def __init__(self, policy: ebb.Policy | None, entry: str = "apply", steps: int = STEPS) -> None:
        self.policy = policy
        self.entry = entry
        self.steps = steps
        self.wraps_later = False

    def region(self, **settings: Any) -> Any:
        if self.policy is None:
            return contextlib.nullcontext()
        return ebb.region(self.policy, **settings)

    def apply(self, model: torch.nn.Module, modules: str, **settings: Any) -> None:
        if self.policy is not None:
            ebb.apply(model, self.policy, modules, **settings)

    def before(
        self, model: torch.nn.Module, modules: str = "layers.*", *, renames: bool = True
    ) -> None:
        """Make blocks regions before the strategy wraps the model.

        Args:
            renames: False if the strategy finds modules within the blocks by name. torch's wrappers
                change these names, so they come afterwards.
        """
        enter = ENTRIES[self.entry]
        self.wraps_later = enter is checkpoint_wrappers and not renames
        if self.policy is not None and enter is not None and not self.wraps_later:
            enter(model, self.policy, modules)

    def after(self, model: torch.nn.Module, modules: str = "layers.*") -> None:
        """Make blocks regions in the wrapped model."""
        if self.entry == "apply later":
            self.apply(model, modules)
        if self.wraps_later and self.policy is not None:
            checkpoint_wrappers(model, self.policy, modules)
