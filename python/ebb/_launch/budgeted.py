"""The blocks of a job's models, and recomputation by the job's own functions."""

from __future__ import annotations

import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from typing import Any

import torch
from torch.compiler import is_compiling

from ebb import _C
from ebb._launch.agreeing import has_ranks
from ebb._launch.variables import warn_setting_ignored
from ebb._plan.measure import Callers
from ebb._policy.policy import Policy
from ebb._region.apply import select
from ebb._region.blocks import block_candidates
from ebb._region.module_names import modules_of
from ebb._region.modules import (
    can_mark,
    mark,
    marks_of,
    modules_are_asked_for,
    number_modules_once,
    unmark_if_unused,
)
from ebb._region.outer_hooks import name_of_hooks
from ebb._region.region import run_in_region
from ebb._region.tracing import is_optimized_module
from ebb._support.job import print_once
from ebb._support.log import log
from ebb._support.shown import clipped

_saved_tensors_hooks = torch._C._autograd._top_saved_tensors_default_hooks


# Note [Evaluation between steps]
# Many jobs evaluate, or generate samples, between two optimizer steps, without gradients. No plan
# can lower the memory of such work, so it does not count towards the next step: when the first
# block runs with gradients, ebb counts the peak anew; a profile omits memory that was both
# allocated and freed before.


class Evaluation:
    """Detects evaluation: calls of blocks without gradients before the first with gradients."""

    def __init__(self) -> None:
        self.has_run = False  # True if a block was called without gradients in this step
        # Called before each step's first call with gradients, with the block's name and arguments.
        self.on_first: Callable[[str, object], None] | None = None
        self._is_over = False  # True if a block was called with gradients in this step
        self._lock = threading.Lock()  # the threads of nn.DataParallel call blocks together

    def called(self, has_gradients: bool, name: str, inputs: object) -> None:
        if self._is_over:
            return
        if not has_gradients:
            self.has_run = True
            return
        with self._lock:
            is_first, self._is_over = not self._is_over, True
        if is_first and self.has_run:
            _C.reset_most_tensor_bytes()
        if is_first and self.on_first is not None:
            self.on_first(name, inputs)

    def step_ended(self) -> None:
        self.has_run = self._is_over = False


class Block:
    """A module that is a region under `policy`, if that is not None."""

    def __init__(
        self, name: str, module: torch.nn.Module, root: torch.nn.Module, evaluation: Evaluation
    ) -> None:
        self.name = name  # unique, from the module's name in its model
        self._evaluation = evaluation
        self.module = weakref.ref(module)
        self.root = weakref.ref(root)
        self.policy: Policy | None = None
        self.in_graphs = False  # True: a region also under torch.compile
        self.calls = 0  # with gradients, since the last `Blocks.take`; no recomputed regions
        self.was_called = False  # True if called by the last `Blocks.take`, or if a plan is known
        self._lock = threading.Lock()  # for `calls`: the threads of nn.DataParallel share the block
        self.met_hooks = False  # True if the job had saved-tensor hooks in place during a call
        self.met_recomputation = False  # True if another function recomputed a call
        mark(module).region = self

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            if self.policy is None or not self.in_graphs:
                return function(*args, **kwargs)
            return self._run_in_region(function, *args, **kwargs)
        has_gradients = torch.is_grad_enabled()
        self._evaluation.called(has_gradients, self.name, (args, kwargs))
        # Without gradients autograd saves nothing, so a region would free no memory.
        if not has_gradients or self.policy is None:
            return function(*args, **kwargs)
        if foreign_recompute_active():
            self.met_recomputation = True
            return function(*args, **kwargs)
        with self._lock:
            self.calls += 1
        self.met_hooks = self.met_hooks or _saved_tensors_hooks(False) is not None
        return self._run_in_region(function, *args, **kwargs)

    def _run_in_region(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return run_in_region((self.policy, self.name, "keep"), function, *args, **kwargs)

    def put(self, policy: Policy | None) -> None:
        root = self.root()
        if policy is not None and root is not None and modules_are_asked_for(policy._compiled):
            number_modules_once(root)
        self.policy = policy

    def leave(self) -> None:
        """Restore the module's own forward."""
        module = self.module()
        if module is not None and (marks := marks_of(module)) and marks.region is self:
            marks.region = None
            unmark_if_unused(module)


class CallAround(AbstractContextManager[Any]):
    """Context around a checkpoint call that may run a block. See Note [Calls around blocks]."""

    def __init__(
        self, blocks: Blocks, function: Callable[..., Any], inside: AbstractContextManager[Any]
    ) -> None:
        self._blocks, self._function, self._inside = blocks, function, inside

    def __enter__(self) -> Any:
        self._before = self._blocks.count_calls()
        return self._inside.__enter__()

    def __exit__(self, *error: Any) -> Any:
        if self._blocks.count_calls() != self._before:
            self._blocks.functions_around.add(_told_apart_by(self._function))
        return self._inside.__exit__(*error)


def _told_apart_by(function: Any) -> Any:
    """The function's module or code: each call may create a new function."""
    while isinstance(function, functools.partial):
        function = function.func
    function = getattr(function, "__self__", function)
    if isinstance(function, torch.nn.Module):
        return function
    for cell in getattr(function, "__closure__", None) or ():
        with suppress(ValueError):  # the cell is empty: its variable has no value yet
            if isinstance(cell.cell_contents, torch.nn.Module):
                return cell.cell_contents
    return getattr(function, "__code__", type(function))


# Note [Calls around blocks]
# The outermost region is the boundary of recomputation, so a region around a block would decide
# when the block's operators are recomputed. Therefore, once a block has run in a
# torch.utils.checkpoint call of some function, later such calls of that function are not regions,
# and the block follows its planned policy. ebb finds these calls in the first step, in which
# everything is recomputed anyway.


class Blocks:
    def __init__(self, patterns: tuple[str, ...], *, in_graphs: bool = False) -> None:
        # Modules or code of checkpointed functions that run a block.
        self.functions_around: weakref.WeakSet[Any] = weakref.WeakSet()
        self.evaluation = Evaluation()
        self.candidate = 0  # the entry of `block_candidates(model)` that gives the blocks
        self._patterns = patterns  # globs over module names; empty: ebb finds the blocks
        self._in_graphs = in_graphs  # True if modules that torch.compile compiles may be blocks
        self._all: list[Block] = []
        self.around = ModulesAround(self)
        # A module keeps its name when it becomes a block again.
        self._names: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()

    def add(self, root: torch.nn.Module, policy: Policy) -> list[str]:
        """Make the blocks of a model regions under a policy; return their names."""
        added = []
        for plain, module in self.of(root):
            if _is_free(module):
                name = self._name_of(module, plain, root)
                block = Block(name, module, root, self.evaluation)
                block.in_graphs = self._in_graphs
                block.put(policy)
                self._all.append(block)
                added.append(name)
                log.info("%s (%s) is a block", name, type(module).__name__)
        return added

    def of(self, root: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
        """Modules of a model that should be blocks, with their names without wrappers."""
        if self._patterns:
            wanted = set(select(root, self._patterns))
        else:
            candidates = block_candidates(root)
            wanted = set(candidates[min(self.candidate, len(candidates) - 1)])
        compiled = {
            inner for module in root.modules() if is_compiled(module) for inner in module.modules()
        }
        found = [
            (plain, _inside(module)) for name, plain, module in modules_of(root) if name in wanted
        ]
        return found if self._in_graphs else [(plain, m) for plain, m in found if m not in compiled]

    def _name_of(self, module: torch.nn.Module, plain: str, root: torch.nn.Module) -> str:
        """A unique name for a block: models of one class have the same module names."""
        if module not in self._names:
            kind = type(root).__name__
            known = set(self._names.values())
            several = (f"{kind}@{number}" for number in itertools.count(2))
            owners = itertools.chain(["", kind], several)
            names = (".".join(filter(None, (owner, plain))) for owner in owners)
            self._names[module] = next(name for name in names if name and name not in known)
        return self._names[module]

    def have(self, candidate: int, models: Iterable[torch.nn.Module]) -> bool:
        """True if one of the models has this candidate."""
        counts = [] if self._patterns else [len(block_candidates(model)) for model in models]
        return candidate < max(counts, default=0)

    def use(self, candidate: int) -> None:
        """Remove all blocks, and select this candidate for those that are added next. Checkpoint
        calls around earlier blocks do not become regions again."""
        self.around.leave()
        for block in self._all:
            block.leave()
        self._all, self.candidate = [], candidate

    def alive(self) -> list[Block]:
        """Blocks whose modules still exist."""
        self._all = [block for block in self._all if block.module() is not None]
        return self._all

    def used(self) -> list[Block]:
        """Blocks that were called with gradients."""
        return [block for block in self.alive() if block.was_called]

    def roots(self) -> list[torch.nn.Module]:
        """Models with blocks that were called with gradients, each once."""
        roots = {id(root): root for block in self.used() if (root := block.root()) is not None}
        return list(roots.values())

    def take(self) -> tuple[int, bool]:
        """Return the number of calls with gradients since the last `take`, and True if a block
        was called for the first time. Resets the counts."""
        calls, has_new = 0, False
        for block in self.alive():
            calls += block.calls
            has_new |= block.calls > 0 and not block.was_called
            block.was_called |= block.calls > 0
            block.calls = 0
        return calls, has_new

    def count_calls(self) -> int:
        """The number of calls with gradients since the last `take`."""
        return sum(block.calls for block in self._all)

    def exclude(self, function: Callable[..., Any]) -> bool:
        """True if a checkpoint call of this function is no region: it is inside or around one."""
        return _C.in_region() or _told_apart_by(function) in self.functions_around

    def put(self, policy: Policy | None) -> None:
        self.around.leave()
        for block in self.alive():
            block.put(policy)

    def follow(self, policies: Mapping[str, Policy]) -> None:
        """Give each block its planned policy. Blocks without one get their own forward back."""
        self.around.leave()
        for block in self.alive():
            block.was_called = True  # by the measured steps, or by those of the plan in a file
        self.around.follow(policies)  # first, since it looks for the blocks' parents
        for block in self._all:
            block.put(policies.get(block.name))
            if block.policy is None:
                block.leave()
        self._all = [block for block in self._all if block.policy is not None]


class ModulesAround:
    """The modules around a job's blocks, which a plan may make regions."""

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks
        self._regions: list[Block] = []
        self._callers: Callers | None = None  # while the callers of blocks are observed
        self._inside: set[str] = set()  # names of blocks that run in the forward of their parent

    def follow(self, policies: Mapping[str, Policy]) -> None:
        """Make modules around blocks regions, as far as they have a planned policy."""
        around = {name: (module, root) for _, name, module, root in self._parents()}
        for name, (module, root) in around.items():
            if name in policies:
                block = Block(name, module, root, self._blocks.evaluation)
                block.put(policies[name])
                self._regions.append(block)

    def leave(self) -> None:
        for block in self._regions:
            block.leave()
        self._regions = []

    def parents(self) -> dict[str, str]:
        """By block name, the region name of the module around it. Empty if the job has several
        ranks, since FSDP may free parameters between blocks."""
        return {
            block.name: name for block, name, _, _ in self._parents() if block.name in self._inside
        }

    def watch_callers(self) -> None:
        """Observe if blocks run in the forward of the modules around them."""
        self.stop_watching_callers()
        if not has_ranks():
            pairs = [
                (block.name, module, caller)
                for block, _, caller, _ in self._parents()
                if (module := block.module()) is not None
            ]
            self._callers = Callers(pairs)

    def stop_watching_callers(self) -> None:
        if self._callers is not None:
            self._inside = self._callers.close()
            self._callers = None

    def _parents(self) -> Iterator[tuple[Block, str, torch.nn.Module, torch.nn.Module]]:
        """Blocks that have a parent, each with its region name, that parent, and the model."""
        known: dict[str, torch.nn.Module | None] = dict.fromkeys(
            block.name for block in self._blocks.alive()
        )
        for block in self._blocks.used():
            module, root = block.module(), block.root()
            if module is None or root is None:
                continue
            callers = {inner: outer for outer in root.modules() for inner in outer.children()}
            name, caller = block.name.rpartition(".")[0], callers.get(module)
            while isinstance(caller, torch.nn.ModuleList | torch.nn.ModuleDict):
                name, caller = name.rpartition(".")[0], callers.get(caller)
            name = name or type(root).__name__
            if caller is None or not _can_be_around(caller):
                continue
            if known.setdefault(name, caller) is caller:  # else the name is another module's
                yield block, name, caller, root


def foreign_recompute_active() -> bool:
    """True if a function of the job recomputes the module being called; prints the function's name.
    If False, the module may be a region; prints a line if the job has saved-tensor hooks."""
    node = torch._C._current_autograd_node() if torch._C._current_graph_task_id() != -1 else None
    # Gradient hooks do not count: GradCache losses run the model with gradients only in a hook.
    if not isinstance(node, torch.autograd.function.BackwardCFunction):
        if (hooks := name_of_hooks()) is not None:
            print_once(
                f"ebb: saved-tensor hooks of the job ({clipped(hooks)}) do not get the tensors "
                "that regions save; if the hooks offload, these tensors stay on the device. To "
                "offload the inputs of blocks, turn the hooks off and set EBB=offload_inputs"
            )
        return False
    by = clipped(type(node).__name__.removesuffix("Backward"))
    warn_setting_ignored(
        f"ebb: modules are no regions inside {by}",
        "it recomputes them by itself. Turn it off to let ebb recompute them; if it offloads, set "
        "EBB=offload_inputs to offload the inputs of blocks",
    )
    return True


def _is_free(module: torch.nn.Module) -> bool:
    """True if the module can be a region, and neither it nor a module inside is one."""
    if isinstance(module, torch.jit.ScriptModule) or not can_mark(module):
        return False
    is_layer = type(module).__module__.startswith("torch.") and not module._modules
    if is_layer and not isinstance(module, torch.nn.RNNBase):
        return False  # a single layer of torch has no activations inside to free
    return not any(_is_region(inner) for inner in module.modules())


def _can_be_around(module: torch.nn.Module) -> bool:
    """True if a module with blocks inside can be a region around them."""
    marks = marks_of(module)
    is_free = can_mark(module) and (marks is None or marks.region is None)
    return is_free and not isinstance(module, torch.jit.ScriptModule) and not is_compiled(module)


def _is_region(module: torch.nn.Module) -> bool:
    """True if the module is a region. A deep copy of a block only has the block's marks."""
    marks = marks_of(module)
    if marks is None or marks.region is None:
        return False
    return not isinstance(marks.region, Block) or marks.region.module() is module


def _inside(module: torch.nn.Module) -> torch.nn.Module:
    """The module itself, or the one that torch.compile has wrapped."""
    return (is_optimized_module(module) and module._modules["_orig_mod"]) or module


def is_compiled(module: torch.nn.Module) -> bool:
    """True if torch.compile has compiled the module, also in place."""
    compiled: bool = module._compiled_call_impl is not None
    return compiled or is_optimized_module(module)
