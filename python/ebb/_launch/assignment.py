"""Assigns policies to the checkpoint calls and modules that ebb takes over in a job."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ebb._launch.budgeted import Blocks
from ebb._policy.policy import Policy
from ebb._support.job import print_first
from ebb._support.log import log
from ebb._support.shown import clipped

TORCHS = "torch.utils.checkpoint"


@dataclass
class Assignment:
    """Policies, and the calls and modules to which they apply."""

    policy: Policy  # of modules, and of torch.utils.checkpoint's calls without one of their own
    text: str  # the user's text for the policy, such as "EBB=1"
    patterns: tuple[str, ...]  # globs over module names
    # Further policies for modules, each with globs over their names.
    others: tuple[tuple[Policy, tuple[str, ...]], ...] = ()
    blocks: Blocks | None = None  # of a budget: see Note [Calls around blocks]
    # Called when ebb first takes over a checkpoint call or a module by its name.
    when_announced: Callable[[], None] | None = None
    # Checkpoint functions whose calls have become regions. If modules have become regions by name,
    # TORCHS is here too.
    announced: set[str] = field(default_factory=set)
    has_calls_in_graphs: bool = False  # True if compiled code calls torch.utils.checkpoint

    def modules(self) -> tuple[tuple[Policy, tuple[str, ...]], ...]:
        """Policies of modules, with globs over the modules' names."""
        return ((self.policy, self.patterns), *self.others)

    def announce(self, source: str = TORCHS) -> None:
        """Print one line when ebb first makes a call of `source`, or a module, a region."""
        if source in self.announced:
            return
        is_first_source = not self.announced
        self.announced.add(source)
        if is_first_source and self.when_announced is not None:
            self.when_announced()
        log.info("%s: calls of %s become regions, and modules %s", self.text, source, self.patterns)
        print_first(
            f"ebb: calls of {source} {self._outcome()} ({self.text}); EBB_DISABLE=1 turns ebb off"
        )

    def _outcome(self) -> str:
        """What becomes of calls and modules, in words; modules may not have run yet."""
        if self.blocks is not None:
            return (
                "inside or around the budget's blocks do not checkpoint any more, and a budget in "
                "percent counts from the peak without checkpointing; other calls are regions"
            )
        if self.others:
            return "are regions, and so will be the modules that the file lists"
        globs = clipped(",".join(self.patterns))
        return f"are regions{globs and f', and so will be modules that match {globs}'}"
