"""What start-up decided to take over."""

from __future__ import annotations

from dataclasses import dataclass

from ebb._policy.policy import Policy
from ebb._support.job import is_first
from ebb._support.log import log
from ebb._support.shown import clipped, tell


@dataclass
class Taken:
    """
    Attributes:
        policy: for calls of torch.utils.checkpoint without a policy of their own, and for modules.
        text: what the user wrote for it.
        patterns: globs over names of modules.
    """

    policy: Policy
    text: str
    patterns: tuple[str, ...]
    _announced: bool = False

    def announce(self) -> None:
        """One line, in the first process of the job, when something has been taken over."""
        if self._announced:
            return
        self._announced = True
        log.info("taken over: %s, modules %s", self.text, self.patterns)
        if not is_first():
            return
        modules = f", modules {clipped(','.join(self.patterns))}" if self.patterns else ""
        tell(
            f"ebb: calls of torch.utils.checkpoint are regions{modules} (EBB={self.text}); "
            "EBB_DISABLE=1 turns it off"
        )
