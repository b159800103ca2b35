"""Finds a job's models, and makes modules regions: by name, or the blocks that ebb finds."""

from __future__ import annotations

import atexit
import functools
import importlib
import weakref
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import torch
from _ebb_switches import is_launcher
from torch.compiler import is_compiling
from torch.nn.modules.module import (
    register_module_forward_pre_hook,
    register_module_module_registration_hook,
)
from torch.optim.optimizer import register_optimizer_step_post_hook

from ebb._launch.assignment import Assignment
from ebb._launch.budgeted import Blocks, foreign_recompute_active
from ebb._launch.variables import warn_setting_ignored
from ebb._policy.policy import Policy
from ebb._region import in_graph
from ebb._region.apply import select
from ebb._region.blocks import regions_by_default
from ebb._region.module_names import plain_names
from ebb._region.modules import (
    can_mark,
    mark,
    marks_of,
    modules_are_asked_for,
    number_modules_once,
)
from ebb._region.region import run_in_region
from ebb._support.job import print_first
from ebb._support.log import log
from ebb._support.names import in_ranges
from ebb._support.shown import clipped

_STEPS = 2  # of an optimizer; by then every model that it trains has run
_MOST_OTHERS = 100  # steps of other optimizers during the wait for one


# Note [When models are looked at]
# A global forward hook slows each module call (by 1 us), torch.compile warns about it, and
# torch.export refuses it. So ebb installs the hook only for two steps of an optimizer. ebb installs
# it for two more if a new model may have appeared: a module was registered in another, or an
# optimizer updates parameters of an unknown model (a fold, a second stage, a late critic). At other
# times a forward has no extra cost.


class ModelObserver:
    def on_new_model(self, model: torch.nn.Module) -> None:
        """Called with each new model, before its first forward."""

    def on_search_done(self, models: list[torch.nn.Module]) -> None:
        """Called with all models when the forward hook is removed."""


class Models:
    """The models of a job. Passes each model to all `observers` when the model first runs."""

    def __init__(self, observers: Iterable[ModelObserver]) -> None:
        self.roots: list[weakref.ref[torch.nn.Module]] = []  # models that observers have met
        # Optimizers that have stepped, with their number of parameter groups.
        self.optimizers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._observers = tuple(observers)
        self._seen: weakref.WeakValueDictionary[int, torch.nn.Module] = (
            weakref.WeakValueDictionary()
        )
        self._steps = 0  # optimizer steps since the hook was installed
        self._others = 0  # the same for optimizers other than the awaited one
        self._awaited: weakref.ref[Any] | None = None  # the optimizer of models that have not run
        self._hook: Any = None  # the forward hook, see Note [When models are looked at]

    def start(self, undo: ExitStack) -> None:
        """Look at models until `undo` is closed."""
        undo.callback(self._stop_looking)
        undo.callback(register_module_module_registration_hook(self._on_registration).remove)
        undo.callback(register_optimizer_step_post_hook(self._on_optimizer_step).remove)
        self._look_again()

    def see(self, module: torch.nn.Module) -> None:
        """Look at a model at its first forward, when it has its final structure."""
        if self._seen.get(id(module)) is module:
            return
        alive = [root for root in self.roots if root() is not None]
        self.roots = [*alive, weakref.ref(module)]
        for inner in module.modules():
            self._seen[id(inner)] = inner
        for observer in self._observers:
            observer.on_new_model(module)

    def _on_forward(self, module: torch.nn.Module, _inputs: Any) -> None:
        if not is_compiling():  # the module around the compiled code has been seen
            self.see(module)

    def _look_again(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        self._steps = self._others = 0
        self._awaited = None if optimizer is None else weakref.ref(optimizer)
        if self._hook is None:
            self._hook = register_module_forward_pre_hook(self._on_forward)

    def _stop_looking(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def _on_registration(self, _outer: torch.nn.Module, _name: str, inner: Any) -> None:
        # A slice of a ModuleList, as transformers' decoders take in each forward, registers modules
        # of a known model in a new list.
        if not is_compiling() and (inner is None or self._seen.get(id(inner)) is not inner):
            self._look_again()

    def _has_strangers(self, optimizer: torch.optim.Optimizer) -> bool:
        """True if the optimizer has parameters of a model that ebb has not seen."""
        modules = list(self._seen.values())
        known = {id(p) for module in modules for p in module._parameters.values()}
        return any(id(p) not in known for group in optimizer.param_groups for p in group["params"])

    def _on_optimizer_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if is_compiling():
            return
        if self.optimizers.get(optimizer) != len(optimizer.param_groups):
            self.optimizers[optimizer] = len(optimizer.param_groups)
            if self._has_strangers(optimizer):
                self._look_again(optimizer)
        if self._hook is None:
            return
        awaited = self._awaited and self._awaited()
        if awaited is not None and awaited is not optimizer and self._others < _MOST_OTHERS:
            self._others += 1  # a critic may step many times before its generator runs
            return
        self._steps += 1
        if self._steps < _STEPS:
            return
        self._stop_looking()
        models = [model for root in self.roots if (model := root()) is not None]
        for observer in self._observers:
            observer.on_search_done(models)


def _run(settings: Any, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A call of a module that the user named."""
    if not is_compiling() and torch.is_grad_enabled() and foreign_recompute_active():
        return function(*args, **kwargs)
    return run_in_region(settings, function, *args, **kwargs)


class ByName(ModelObserver):
    """Makes modules regions by name, and numbers modules if rules refer to modules."""

    def __init__(self, assignment: Assignment) -> None:
        self._assignment = assignment
        self._lines: set[str] = set()  # messages about modules that became regions
        self._warned = False  # True after the warning about patterns that match no module

    def on_new_model(self, model: torch.nn.Module) -> None:
        made = []
        for policy, patterns in self._assignment.modules():
            made += self._mark(model, policy, patterns)
        if made:
            self._tell_of(made, model)

    def _mark(self, model: torch.nn.Module, policy: Policy, patterns: tuple[str, ...]) -> list[str]:
        if modules_are_asked_for(policy._compiled):
            number_modules_once(model)
        made = []
        for name, inner in select(model, patterns).items():
            marked = [marks_of(m) for m in inner.modules()]
            if can_mark(inner) and all(marks is None or marks.region is None for marks in marked):
                self._assignment.announce()
                name = name or type(inner).__name__
                mark(inner).region = functools.partial(_run, (policy, name, "keep"))
                made.append(name)
                log.info("%s (%s) is a region", name, type(inner).__name__)
        return made

    def _tell_of(self, made: list[str], model: torch.nn.Module) -> None:
        what = "module is a region" if len(made) == 1 else "modules are regions"
        line = f"ebb: {len(made)} {what}: {', '.join(in_ranges(made))}"
        names = [glob for _, globs in self._assignment.others for glob in globs]
        missing = [glob for glob in names if not select(model, (glob,))]
        if missing:
            kind = clipped(type(model).__name__)
            line += f"; {kind} has no module named {clipped(', '.join(in_ranges(missing)), 300)}"
        if line not in self._lines:
            print_first(line)
        self._lines.add(line)

    def on_search_done(self, models: list[torch.nn.Module]) -> None:
        patterns = [glob for _, globs in self._assignment.modules() for glob in globs]
        if not patterns or self._lines or self._warned:
            return
        self._warned = True
        shown = in_ranges(plain_names(models))
        kinds = ", ".join(dict.fromkeys(type(model).__name__ for model in models))
        globs = f"EBB_MODULES={clipped(','.join(self._assignment.patterns))}"
        source = clipped(self._assignment.text) if self._assignment.others else globs
        warn_setting_ignored(
            f"ebb: no module matches {source}, so none becomes a region",
            f"module names of {clipped(kinds)}: {', '.join(shown[:20])}"
            f"{', ...' if len(shown) > 20 else ''}",
        )


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
        atexit.register(self.print_found, is_late=True)
        undo.callback(atexit.unregister, self.print_found)
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


_models: Models | None = None  # while ebb takes models over


def take_over(assignment: Assignment, undo: ExitStack, blocks: ModelObserver | None = None) -> None:
    """Make modules with matching names regions, and number modules if rules refer to modules, in
    all models that run until `undo` is closed. `blocks` makes blocks of each model regions."""
    global _models
    _models = Models(filter(None, (ByName(assignment), blocks)))

    @undo.callback
    def forget() -> None:
        global _models
        _models = None

    asked = any(
        patterns or modules_are_asked_for(policy._compiled)
        for policy, patterns in assignment.modules()
    )
    if asked or blocks is not None:
        _models.start(undo)


def lightning_callback(package: str) -> Any:
    """A callback that looks at a model before training, for a package such as
    ``lightning.pytorch``. Each package has a callback class of its own."""
    base: Any = importlib.import_module(f"{package}.callbacks").Callback

    class Ebb(base):  # type: ignore[misc]
        def setup(self, trainer: Any, pl_module: torch.nn.Module, stage: str) -> None:
            if _models is not None:
                _models.see(pl_module)

        def __reduce__(self) -> Any:
            # The class exists only at run time, so pickle (strategy `ddp_spawn`) gets the function.
            return lightning_callback, (package,)

    return Ebb()
