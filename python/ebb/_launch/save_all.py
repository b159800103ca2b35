"""``EBB_BUDGET=auto``: saves all activations while memory suffices, then makes a plan."""

from __future__ import annotations

import torch

from ebb import _C
from ebb._launch.agreeing import ranks_of_job
from ebb._launch.budgeted_job import BudgetedJob, Phase
from ebb._launch.memory_limit import Limit
from ebb._plan.profile.measuring import base_bytes, devices_of
from ebb._report.text import size
from ebb._support import devices


class SaveAll(Phase):
    """Saves all activations while the memory in use is below a limit. Once ebb has had to free
    what earlier regions saved, it measures steps and makes a plan. Ranks reach their limits at
    different steps; when the first rank does, all ranks measure. See Note [Ranks that agree].

    On an accelerator the first step recomputes: an allocator that runs short does not tell how much
    it needs, and ebb learns there how large its pieces are. See Note [Memory given back].
    """

    def __init__(self, job: BudgetedJob, limit: Limit) -> None:
        super().__init__(job)
        self._limit_as_given = limit
        self._limits: dict[torch.device, int] = {}  # bytes, on each device of a model
        self._steps = 0  # steps that have ended while everything was saved
        self._given_up = _C.room_stats()["regions_given_up"]

    def on_new_model(self, model: torch.nn.Module, names: list[str]) -> None:
        for device in devices_of(model) - self._limits.keys():
            limit = self._limits[device] = self._limit_as_given.nbytes(device)
            if device.type == "cuda":
                _C.allow_allocator(devices.allowed_of(device), device)
            if device.type == "cpu" or self._steps > 0:
                _C.keep_while_there_is_room(limit, device)
        super().on_new_model(model, names)

    def announce(self, names: list[str]) -> None:
        limit = next(iter(self._limits.values()))
        self.job.messages.announce(
            names,
            f"ebb saves all activations while less than {size(limit)} of memory is in use. "
            "Above that, it recomputes these blocks, earliest first: {}; EBB_DISABLE=1 turns ebb "
            "off",
        )

    def has_filled(self) -> bool:
        """Call at the end of each step. True if ebb measures steps from now on."""
        self._steps += 1
        if self._steps == 1:
            for device, limit in self._limits.items():
                _C.keep_while_there_is_room(limit, device)
            self.job.ranks = ranks_of_job()
        is_full = _C.room_stats()["regions_given_up"] > self._given_up
        return self.job.ask_ranks(lambda ranks: ranks.begins(self._steps, is_full), is_full)

    def _limit_of_plan(self) -> int:
        """Bytes for tensors: the room's limit, which is lower than before if an allocator has run
        short, or less. An accelerator's allocator reserves more than it allocates. If it reached
        the end of the device's memory, it would return and take memory in each step."""
        limit = _C.room_limit()
        for device in list(self._limits)[:1]:  # none if this rank has met no model
            if peaks := devices.peaks_of(device):
                allocated, reserved = peaks
                share = allocated / max(reserved, allocated, 1)
                limit = min(limit, int(Limit().nbytes(device) * share))
        return limit

    def begin_to_plan(self) -> None:
        """Set the budget of the plans that follow."""
        job = self.job
        limit = self._limit_of_plan()
        _C.keep_while_there_is_room(0)
        beside = max(0, _C.bytes_in_use() - base_bytes(list(job.models), list(job.optimizers)))
        job.budget = max(1, limit - beside)
        job.messages.beside_limit = beside
        what = f"a budget of {size(job.budget)}" if beside < limit else "the lowest peak"
        job.messages.tell(
            f"memory is too small to save all activations: ebb profiles steps, then plans for "
            f"{what}. The limit is {size(limit)}; memory other than weights, gradients and "
            f"optimizer states takes {size(beside)} of it"
        )
