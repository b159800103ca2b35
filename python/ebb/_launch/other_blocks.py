"""Chooses other modules as the blocks of a budget."""

from __future__ import annotations

import math
from collections.abc import Collection

import torch

from ebb._launch.agreeing import has_ranks
from ebb._launch.budgeted import Blocks
from ebb._launch.decided import Decided
from ebb._launch.memory_limit import free
from ebb._plan.profile.measuring import device_of

_ROOM = 1.25  # times the peak without regions, see Note [Other blocks]


# Note [Other blocks]
# If the budget is too small for the blocks that find_blocks names, much of a step's memory may be
# for work between them, such as a U-Net's concatenations. Then ebb measures steps with coarser
# blocks. If no candidate stays within the budget, ebb uses the one that needs the least memory.
# When backward enters a region, most of it is recomputed at once, so a coarser region may need more
# memory than a step without regions: up to a fifth more in loops of recurrent cells. ebb measures
# coarser blocks only if 1.25 times the peak without regions is free.


class OtherBlocks:
    """Tries the candidates for blocks. See Note [Other blocks]."""

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks
        self._leasts: dict[int, float] = {}  # lowest peak in bytes, by Blocks.candidate
        self._plain_peak = 0  # peak bytes of a step without regions

    def next(self, models: Collection[torch.nn.Module], least: Decided | None) -> int | None:
        """The candidate to measure next; None if no other blocks may be better. `least`: the plan
        with the lowest peak for the current blocks; None: they cannot be measured."""
        here = self._blocks.candidate
        if has_ranks() or here in self._leasts or not (self._leasts or least):
            return None
        self._leasts[here] = math.inf if least is None else least.peak
        if least is not None:
            self._plain_peak = least.plain_peak
        following = here + 1
        may = self._blocks.have(following, models)
        if not may or _ROOM * self._plain_peak > free(device_of(models)):
            following = min(self._leasts, key=self._leasts.__getitem__)
        return None if following == here else following
