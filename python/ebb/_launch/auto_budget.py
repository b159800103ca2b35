"""``EBB_BUDGET=auto``: saves all activations while memory suffices, then makes a plan."""

from __future__ import annotations

from contextlib import ExitStack

import torch

from ebb import _C
from ebb._launch.agreeing import Ranks, ranks_of_job
from ebb._launch.assignment import Assignment
from ebb._launch.budget import Budget
from ebb._launch.memory_limit import Limit
from ebb._plan.profile.measuring import base_bytes, devices_of
from ebb._report.text import size
from ebb._support import devices
from ebb._support.log import log
from ebb._support.names import in_ranges
from ebb._support.shown import clipped


class AutoBudget(Budget):
    """Saves all activations while the memory in use is below a limit. Once ebb has had to free
    what earlier regions saved, it measures steps and makes a plan. Ranks reach their limits at
    different steps; when the first rank does, all ranks measure. See Note [Ranks that agree].

    On an accelerator the first step recomputes: an allocator that runs short does not tell how much
    it needs, and ebb learns there how large its pieces are. See Note [Memory given back].
    """

    def __init__(
        self, limit: Limit, text: str, patterns: tuple[str, ...], assignment: Assignment
    ) -> None:
        super().__init__(0, text, patterns, assignment)  # the budget is set when a plan is made
        self._limit_as_given = limit
        self._limit = 0  # bytes, on the first device; 0: before the first model
        self._limits: dict[torch.device, int] = {}  # bytes, on each device
        self._kept_steps = 0  # steps that have ended while everything was saved
        self._is_full = False
        self._others: Ranks | None = None  # the job's ranks while everything is saved

    def start(self, undo: ExitStack) -> None:
        super().start(undo)
        self._given_up = _C.room_stats()["regions_given_up"]
        undo.callback(_C.keep_while_there_is_room, 0)

    def meet(self, model: torch.nn.Module) -> None:
        if not self._is_full and not self._has_ended and not devices.why_uncounted():
            try:
                for device in devices_of(model) - self._limits.keys():
                    limit = self._limit_as_given.nbytes(device)
                    self._limits[device] = limit
                    self._limit = self._limit or limit
                    if device.type == "cuda":
                        _C.allow_allocator(devices.allowed_of(device), device)
                    if device.type == "cpu" or self._kept_steps > 0:
                        _C.keep_while_there_is_room(limit, device)
            except Exception as error:
                self._fail(error)
        super().meet(model)

    def _announce(self, names: list[str]) -> None:
        if not self._announced:
            self._announced = True
            shown_names = clipped(", ".join(dict.fromkeys(in_ranges(names))), 300)
            self._tell(
                f"ebb saves all activations while less than {size(self._limit)} of memory is in "
                f"use. Above that, it recomputes these blocks, earliest first: {shown_names}; "
                "EBB_DISABLE=1 turns ebb off"
            )

    def _step_ended(self, is_step: bool) -> None:
        if not self._is_full:
            self._kept_steps += 1
            if not self._begins():
                self.blocks.take()
                return
            self._begin_to_plan()
            is_step = False  # the step that ended saved everything; measured steps recompute
        super()._step_ended(is_step)

    def _begins(self) -> bool:
        """True if ebb measures steps from now on; False while there is room."""
        if self._kept_steps == 1:
            for device, limit in self._limits.items():
                _C.keep_while_there_is_room(limit, device)
            self._others = ranks_of_job()
            if self._others is not None:
                self._others.join()
        is_full = _C.room_stats()["regions_given_up"] > self._given_up
        if self._others is not None:
            try:
                return self._others.begins(self._kept_steps, is_full)
            except Exception as error:  # the type depends on the store
                log.info("budget: this rank plans alone, the others are not reachable: %s", error)
                self._others = None
        return is_full

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

    def _begin_to_plan(self) -> None:
        """Plan from now on."""
        self._is_full = True
        self._limit = self._limit_of_plan()
        _C.keep_while_there_is_room(0)
        models, optimizers = list(self._models), list(self._clock.optimizers)
        beside = max(0, _C.bytes_in_use() - base_bytes(models, optimizers))
        self._budget = max(1, self._limit - beside)
        self._ranks, self._others = self._others, None
        what = f"a budget of {size(self._budget)}" if beside < self._limit else "the lowest peak"
        self._tell(
            f"memory is too small to save all activations: ebb profiles steps, then plans for "
            f"{what}. The limit is {size(self._limit)}; memory other than weights, gradients and "
            f"optimizer states takes {size(beside)} of it"
        )
