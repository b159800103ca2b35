"""What start-up decided to take over."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from ebb._policy.policy import Policy
from ebb._support.job import is_first
from ebb._support.log import log
from ebb._support.shown import clipped, tell

InCall = AbstractContextManager[Any]


@dataclass
class Taken:
    """
    Attributes:
        policy: for calls of torch.utils.checkpoint without a policy of their own, and for modules.
        text: what the user wrote for it, such as ``"EBB=1"``.
        patterns: globs over names of modules.
        others: policies of modules with other ones, each with globs over their names.
        in_call: for a function that torch.utils.checkpoint calls: wraps what is entered in the
            call's region. None: the call is no region.
        when_announced: is called when a call of torch.utils.checkpoint, or a module by its name,
            is taken over for the first time.
        announced: whether that has been.
    """

    policy: Policy
    text: str
    patterns: tuple[str, ...]
    others: tuple[tuple[Policy, tuple[str, ...]], ...] = ()
    in_call: Callable[[Callable[..., Any]], Callable[[InCall], InCall] | None] | None = None
    when_announced: Callable[[], None] | None = None
    announced: bool = False

    def modules(self) -> tuple[tuple[Policy, tuple[str, ...]], ...]:
        """Policies of modules, and globs over their names."""
        return ((self.policy, self.patterns), *self.others)

    def announce(self) -> None:
        """One line, in the first process of the job, when something has been taken over."""
        if self.announced:
            return
        self.announced = True
        if self.when_announced is not None:
            self.when_announced()
        log.info("taken over by %s, modules %s", self.text, self.patterns)
        if not is_first():
            return
        modules = f", modules {clipped(','.join(self.patterns))}" if self.patterns else ""
        also = "the modules that it names, and " if self.others else ""
        tell(
            f"ebb: {also}calls of torch.utils.checkpoint are regions{modules} ({self.text}); "
            "EBB_DISABLE=1 turns it off"
        )
