"""EBB without module names: makes the blocks of a job's models regions."""

from __future__ import annotations

import atexit
import functools
from contextlib import ExitStack

import torch
from _ebb_switches import is_launcher

from ebb._launch.assignment import Assignment
from ebb._launch.budgeted import Blocks
from ebb._launch.models import ModelObserver
from ebb._launch.variables import warn_setting_ignored
from ebb._region import in_graph
from ebb._region.blocks import regions_by_default
from ebb._support.job import print_first
from ebb._support.names import in_ranges
from ebb._support.shown import clipped

# Note [Blocks of a job]
# ebb learns whether a job that sets EBB and names no modules calls torch.utils.checkpoint only when
# the job does so. If a model fits into memory only with regions, its first step needs them too. So
# the blocks that ebb.apply selects are regions from a model's first forward on. The first call of
# torch.utils.checkpoint ends these regions: the job itself decides what is recomputed. With
# EBB_MODULES=auto the blocks stay regions. After two optimizer steps, or at exit, one line says
# which modules are regions, or that none is.


class FoundBlocks(ModelObserver):
    """Makes the blocks of each model regions."""

    def __init__(self, assignment: Assignment, stay: bool) -> None:
        self._assignment = assignment
        self._stay = stay  # True if blocks stay regions in a job that calls torch.utils.checkpoint
        self._blocks = Blocks((), in_graphs=True)
        self._models: list[str] = []  # classes of models
        self._trains = False  # a model's first forward had gradients, or an optimizer has stepped
        self._told = False
        self._began = in_graph.new_number()
        if not stay:  # calls that are running finish as they are
            assignment.when_announced = functools.partial(self._blocks.put, None)

    def start(self, undo: ExitStack) -> None:
        """Print the line at exit at the latest, and end the regions when `undo` is closed."""
        atexit.register(self._at_exit)
        undo.callback(atexit.unregister, self._at_exit)
        undo.callback(self._blocks.put, None)

    def on_new_model(self, model: torch.nn.Module) -> None:
        self._models.append(type(model).__name__)
        self._trains |= torch.is_grad_enabled()
        if self._assignment.announced and not self._stay:
            return
        if regions_by_default(model):
            self._blocks.add(model, self._assignment.policy)

    def on_search_done(self, models: list[torch.nn.Module]) -> None:
        self._trains = True
        self.print_found()

    def _at_exit(self) -> None:
        self.print_found(is_late=True)

    def print_found(self, *, is_late: bool = False) -> None:
        """Report once which blocks are regions. `is_late`: True at exit."""
        if self._told or not self._models or not self._trains or is_launcher():
            return
        self._told = True
        blocks, in_graphs = self._blocks.alive(), in_graph.names_entered(self._began)
        if self._assignment.announced and not self._stay:
            self._blocks.use(0)  # restore the modules' own forward
        elif used := [block.name for block in blocks if block.calls or block.name in in_graphs]:
            self._tell_of(used)
        elif not self._assignment.announced and not any(b.met_recomputation for b in blocks):
            self._tell_of_nothing(is_late)

    def _tell_of(self, names: list[str]) -> None:
        what = "module is a region" if len(names) == 1 else "modules are regions"
        shown = clipped(", ".join(in_ranges(names)), 300)
        why = "" if self._stay else ", since the job does not call torch.utils.checkpoint"
        if self._assignment.has_calls_in_graphs:
            why = "; in compiled code, torch's own checkpoint runs inside of them"
        print_first(
            f"ebb: {len(names)} {what}: {shown} ({self._assignment.text}{why}); "
            "EBB_MODULES=none turns this off"
        )

    def _tell_of_nothing(self, is_late: bool) -> None:
        models = clipped(", ".join(dict.fromkeys(self._models)), 200)
        calls = (
            "the job calls torch.utils.checkpoint only in compiled code, where torch runs it"
            if self._assignment.has_calls_in_graphs
            else "the job does not call torch.utils.checkpoint"
        )
        warn_setting_ignored(
            f"ebb: {self._assignment.text} has no effect so far",
            f"{calls}, and no repeated block of {models} ran "
            "with gradients. Name modules to make them regions: "
            "EBB_MODULES='*.layers.*'. python -m ebb --list-modules SCRIPT lists their names",
            is_late=is_late,
        )
