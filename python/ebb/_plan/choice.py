"""Choices: decisions for the results of a region's operators, which all stages of planning use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

Operators = frozenset[int]
"""Operators of a region, as indices from its first operator."""


@dataclass(frozen=True)
class Choice:
    """Decisions for the results of a region's operators. Others are recomputed once."""

    saved: Operators = frozenset()
    offloaded: Operators = frozenset()  # and fetched for backward
    each_time: Operators = frozenset()  # recomputed each time that something needs the results
    inputs: bool = False  # True if inputs that another function made are offloaded too
    paged: Operators = frozenset()  # the valid rows go to page pools
    paged_inputs: bool = False  # True if the valid rows of inputs go to page pools

    @property
    def kept(self) -> Operators:
        """Operators that need not be recomputed."""
        return self.saved | self.offloaded | self.paged

    @property
    def sends(self) -> bool:
        """True if anything is offloaded."""
        return self.inputs or bool(self.offloaded)

    @property
    def pages(self) -> bool:
        """True if anything goes to page pools."""
        return self.paged_inputs or bool(self.paged)

    def mapped(self, function: Callable[[Operators], Operators]) -> Choice:
        """The same choice with each set of operators mapped by a function."""
        return replace(
            self,
            saved=function(self.saved),
            offloaded=function(self.offloaded),
            each_time=function(self.each_time),
            paged=function(self.paged),
        )


EAGER = None
"""In place of a choice: the block is no region, and runs as in eager."""
