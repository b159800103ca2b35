"""What one region does with what its operators make."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

Operators = frozenset[int]
"""Some operators of a region, counted from its first one."""


@dataclass(frozen=True)
class Choice:
    """What becomes of results; what is in none of these is made again once.

    Attributes:
        saved: the operators whose results are kept.
        offloaded: those whose results leave, and come back for backward.
        each_time: those whose results are made again whenever something needs them.
        inputs: whether what the region reads and another function made leaves too.
        paged: the operators of whose results live rows go to page pools.
        paged_inputs: whether those of what the region reads do.
    """

    saved: Operators = frozenset()
    offloaded: Operators = frozenset()
    each_time: Operators = frozenset()
    inputs: bool = False
    paged: Operators = frozenset()
    paged_inputs: bool = False

    @property
    def kept(self) -> Operators:
        """What does not have to be made again."""
        return self.saved | self.offloaded | self.paged

    @property
    def sends(self) -> bool:
        """Whether anything leaves."""
        return self.inputs or bool(self.offloaded)

    @property
    def pages(self) -> bool:
        """Whether anything goes to page pools."""
        return self.paged_inputs or bool(self.paged)

    def mapped(self, function: Callable[[Operators], Operators]) -> Choice:
        """The same for other operators."""
        return replace(
            self,
            saved=function(self.saved),
            offloaded=function(self.offloaded),
            each_time=function(self.each_time),
            paged=function(self.paged),
        )


PLAIN = None
"""In place of a choice: the block is no region at all."""
