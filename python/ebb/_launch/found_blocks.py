"""EBB without module names: the blocks of a job's models become regions."""

from __future__ import annotations

import atexit
from contextlib import ExitStack

import torch

from ebb._launch.budgeted import Blocks
from ebb._launch.taken import Taken
from ebb._launch.variables import say_ignored
from ebb._support.job import is_first, is_launcher, say
from ebb._support.names import in_ranges
from ebb._support.shown import clipped, tell

# Note [Blocks of a job]
# A job that sets EBB and names no modules may call torch.utils.checkpoint, or it may not. This is
# known only when it does. If a model has to be in regions to fit into memory, its first step has
# to be in regions, too. So the blocks that find_blocks names are regions from a model's first
# forward on. The first call of torch.utils.checkpoint ends that: the job says by itself what is
# recomputed. With EBB_MODULES=auto the blocks stay regions. After two optimizer steps, or at exit,
# one line says which modules are regions, or that none is.


class FoundBlocks:
    """Makes the blocks of each model regions.

    Args:
        taken: its policy is that of the blocks.
        stay: blocks are regions even if the job calls torch.utils.checkpoint.
    """

    def __init__(self, taken: Taken, stay: bool) -> None:
        self._taken = taken
        self._stay = stay
        self._blocks = Blocks(())
        self._names: list[str] = []  # of blocks
        self._models: list[str] = []  # classes of models
        self._trains = False  # a model ran with gradients at first, or an optimizer stepped
        self._told = False
        if not stay:
            taken.when_announced = self._end

    def start(self, undo: ExitStack) -> None:
        """From now on, until `undo` is closed."""
        atexit.register(self._at_exit)
        undo.callback(atexit.unregister, self._at_exit)
        undo.callback(self._end)

    def meet(self, model: torch.nn.Module) -> None:
        """Before the first forward of a model."""
        self._models.append(type(model).__name__)
        self._trains |= torch.is_grad_enabled()
        if self._taken.announced and not self._stay:
            return
        if len(list(self._blocks.of(model))) > 1:
            self._names += self._blocks.add(model, self._taken.policy)

    def settled(self) -> None:
        """Optimizers have stepped. Raises as `tell`."""
        self._trains = True
        self.tell()

    def _at_exit(self) -> None:
        try:
            self.tell()
        except ValueError as error:  # of EBB_STRICT; the job has ended already
            say(str(error))

    def _end(self) -> None:
        """Calls that run now go on as they are; others are no regions."""
        self._blocks.put(None)

    def tell(self) -> None:
        """Says, once, which blocks are regions.

        Raises:
            ValueError: nothing is a region, and EBB_STRICT is set.
        """
        if self._told or not self._models or not self._trains or is_launcher():
            return
        self._told = True
        if self._taken.announced and not self._stay:
            self._blocks.use(0)  # their modules have their own forward again
        elif used := [block.name for block in self._blocks.called()]:
            self._tell_of(used)
        elif not self._taken.announced:
            self._tell_of_nothing()

    def _tell_of(self, names: list[str]) -> None:
        what = "module is a region" if len(names) == 1 else "modules are regions"
        shown = clipped(", ".join(dict.fromkeys(in_ranges(names))), 300)
        why = "" if self._stay else ", since the job does not call torch.utils.checkpoint"
        if is_first():
            tell(
                f"ebb: {len(names)} {what}: {shown} ({self._taken.text}{why}); "
                "EBB_MODULES=none turns this off"
            )

    def _tell_of_nothing(self) -> None:
        models = clipped(", ".join(dict.fromkeys(self._models)), 200)
        say_ignored(
            f"ebb: {self._taken.text} has no effect so far",
            f"the job does not call torch.utils.checkpoint, and no repeated block of {models} ran "
            "with gradients (compiled blocks do not count). Name modules to make them regions: "
            "EBB_MODULES='*.layers.*'. python -m ebb --list-modules SCRIPT lists their names",
        )
