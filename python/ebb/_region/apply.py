"""Makes a model's modules regions without changing their code."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from fnmatch import fnmatchcase
from typing import Any

import torch

from ebb._policy.idle_rules import warn_of_modules
from ebb._policy.policy import Policy
from ebb._region.blocks import has_forward, regions_by_default
from ebb._region.module_names import modules_of, names_of, plain_names
from ebb._region.modules import (
    can_unmark,
    check_can_mark,
    mark,
    marks_of,
    modules_are_asked_for,
    number_modules,
    unmark_if_unused,
    unnumber,
)
from ebb._region.region import _check_policy, check_escapes, leaving, run_in_region
from ebb._support.log import log
from ebb._support.shown import checked_name

Wanted = tuple[str, ...] | Callable[[torch.nn.Module, str], bool]


class RegionHandle(AbstractContextManager["RegionHandle"]):
    """The result of ``apply``; its ``remove`` undoes the call.

    Attributes:
        names: the fully qualified names of the modules that became regions.
    """

    def __init__(
        self, modules: dict[str, torch.nn.Module], numbered: list[torch.nn.Module]
    ) -> None:
        self._regions = {n: (module, mark(module).region) for n, module in modules.items()}
        self._numbered = numbered  # modules whose forward tells ebb that they run
        self.names = tuple(modules)

    def remove(self) -> None:
        """Restore the modules' own forward. Modules for which ``remove`` or an earlier call did
        so stay as they are.

        Raises:
            RuntimeError: after ``apply``, other code has wrapped a module's forward or class
                (undo that first). No module is changed.
        """
        still = {
            name: module
            for name, (module, region) in self._regions.items()
            if (marks := marks_of(module)) and marks.region is region
        }
        _unmark_all(still)
        if still:
            unnumber(self._numbered)
        self._regions.clear()  # they keep the modules alive
        self._numbered.clear()

    def __exit__(self, *_: object) -> None:
        self.remove()


def _unmark_all(modules: dict[str, torch.nn.Module]) -> None:
    """Restore the own forward of modules that are regions, by name; all of them or none."""
    for name, module in modules.items():
        if not can_unmark(module):
            raise RuntimeError(
                f"ebb: the forward or class of module {name!r} was replaced after ebb.apply; "
                "undo that before calling remove()"
            )
    for module in modules.values():
        mark(module).region = None
        unmark_if_unused(module)


def remove(model: torch.nn.Module) -> tuple[str, ...]:
    """Restore the own forward of all modules in a model that ``apply`` made regions: for copies
    of the model, which have the regions but no handle, or if the handle is lost.

    Settings that a plan has put in place end with the plan's handle.

    Args:
        model: may have no regions.

    Returns:
        The fully qualified names of the modules that were regions.

    Raises:
        TypeError: ``model`` is no module.
        RuntimeError: after ``apply``, other code has wrapped a module's forward or class (undo
            that first). No module is changed.

    Examples:
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
        >>> handle = ebb.apply(model, ebb.policies.recompute_all, modules="[01]")
        >>> import copy
        >>> ebb.remove(copy.deepcopy(model))
        ('0', '1')
    """
    _check_model(model)
    regions = {
        name: module
        for name, _, module in modules_of(model)
        if (marks := marks_of(module)) and getattr(marks.region, "func", None) is run_in_region
    }
    _unmark_all(regions)
    marked = [(module, marks) for module in model.modules() if (marks := marks_of(module))]
    if regions and not any(marks.is_root for _, marks in marked):
        for module, marks in marked:
            marks.number = marks.asked_by = 0
            unmark_if_unused(module)
    return tuple(regions)


def _check_model(model: object) -> None:
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"ebb: model must be a torch.nn.Module; got {type(model).__name__}")


def select(model: torch.nn.Module, wanted: Wanted) -> dict[str, torch.nn.Module]:
    """The modules that `wanted` selects, by name; outermost matches only."""
    chosen: dict[str, torch.nn.Module] = {}
    for name, plain, module in modules_of(model):
        inside_chosen = any(name.startswith(f"{outer}.") or outer == "" for outer in chosen)
        if callable(wanted):
            matches = bool(wanted(module, plain))
        else:
            matches = any(fnmatchcase(n, glob) for n in {name, plain} for glob in wanted)
        if matches and not inside_chosen and "_orig_mod" not in module._modules:
            chosen[name] = module
    return _callable(chosen)


def _callable(chosen: dict[str, torch.nn.Module]) -> dict[str, torch.nn.Module]:
    """Replaces a ModuleList or ModuleDict, which has no forward, by the modules in it."""
    found: dict[str, torch.nn.Module] = {}
    for name, module in chosen.items():
        if has_forward(module):
            found[name] = module
        else:
            prefix = f"{name}." if name else ""
            inner = {f"{prefix}{key}": part for key, part in module.named_children()}
            found |= _callable(inner)
    return found


def _blocks_of(model: torch.nn.Module) -> Wanted:
    """Selects the model's blocks; for a compiled block, the module inside."""
    names = regions_by_default(model)
    if not names:
        raise ValueError(
            f"ebb: {type(model).__name__} has no blocks, that is modules which repeat. Name the "
            'modules that should become regions, for example modules="encoder.*". If '
            f'{type(model).__name__} is itself one block of a larger model, pass modules="". A '
            "model that is one region as a whole frees activations, but backward recomputes most "
            "of them at once."
        )
    blocks = [model.get_submodule(name) for name in names]
    wanted = {id(block._modules.get("_orig_mod") or block) for block in blocks}
    return lambda module, _: id(module) in wanted


def _wanted(modules: Any) -> Wanted:
    if isinstance(modules, torch.nn.Module):
        raise TypeError(
            "ebb: modules must be names or a function, not a module; pass its name, such as "
            "modules='encoder', or call ebb.apply on that module with modules=''"
        )
    if callable(modules):
        try:
            inspect.signature(modules).bind(None, "")
        except TypeError:
            raise TypeError(
                "ebb: modules must be a function of a module and its name, such as "
                "lambda module, name: isinstance(module, Block)"
            ) from None
        except ValueError:  # it has no signature
            pass
        return modules  # type: ignore[no-any-return]
    one = isinstance(modules, str) or not isinstance(modules, Iterable)
    patterns = (modules,) if one else tuple(modules)
    if not all(isinstance(pattern, str) for pattern in patterns):
        raise TypeError("ebb: modules must be a string, an iterable of strings, or a function")
    if not patterns:
        raise ValueError("ebb: modules is empty; pass globs of module names, or None for blocks")
    for pattern in patterns:
        checked_name("a glob of modules", pattern)
    return patterns


def _no_match(model: torch.nn.Module, wanted: Wanted) -> ValueError:
    if isinstance(wanted, tuple):
        what = repr(", ".join(wanted))
    else:
        what = f"the function {getattr(wanted, '__name__', wanted)!r}"
    names = plain_names([model])
    shown = ", ".join(names[:20]) + (f", ... ({len(names)} in all)" if len(names) > 20 else "")
    return ValueError(f"ebb: no module matches {what}. Module names: {shown}")


def apply(
    model: torch.nn.Module,
    policy: Policy | None = None,
    modules: str | Iterable[str] | Callable[[torch.nn.Module, str], bool] | None = None,
    *,
    escapes: str = "keep",
) -> RegionHandle:
    """Make the forward of each matching module a region.

    The model's state_dict, parameters and hooks do not change. A matching module's class becomes
    a subclass of the same name, so ``isinstance`` still holds. Copies (``copy.deepcopy``) are
    regions too; pickling stores the original class.

    Args:
        model: the model to change in place.
        policy: what happens to each op's outputs; default ``ebb.policies.recompute_all``.
        modules: one or several globs over fully qualified names, as ``model.named_modules()`` gives
            them or without the parts that wrappers add (torch.compile, DDP, FSDP, checkpoint
            wrappers); ``*`` matches dots too. Or a function of a module and its name, without
            the wrappers' parts, which returns True if the module should be a region.
            If matches are nested, the outermost becomes a region. A ModuleList that matches is
            replaced by the modules in it. Default: the blocks that the model repeats, such as the
            layers of a transformer. If the model repeats none, its large parts become regions, such
            as an encoder and a decoder. The empty name, ``""``, makes any module one region. Use
            it for a single block. A whole model as one region frees activations, but backward
            recomputes most of them at once, so the peak memory does not go down.
            Rules with ``module=`` see the names of the modules in ``model`` at this call.
        escapes: as for ``ebb.region``.

    Returns:
        A handle whose ``remove()`` undoes this call; also a context manager.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: no module matches; or ``modules`` is not given, and the model repeats no modules
            and has fewer than two large parts; or a matching module is already a region or is a
            lazy module with uninitialized parameters; or ``escapes`` is unknown. No module is
            changed.

    Examples:
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
        >>> handle = ebb.apply(model, ebb.policies.recompute_all, modules="[01]")
        >>> handle.names
        ('0', '1')
        >>> handle.remove()
    """
    _check_model(model)
    policy = _check_policy(policy)
    check_escapes(escapes)
    leaving(escapes)
    wanted = _blocks_of(model) if modules is None else _wanted(modules)
    chosen = select(model, wanted)
    if not chosen:
        raise _no_match(model, wanted)
    for name, module in chosen.items():
        if (marks := marks_of(module)) and marks.region is not None:
            raise ValueError(
                f"ebb: module {name!r} is already a region; call remove() on the handle that the "
                "earlier ebb.apply returned, or ebb.remove(model) if the handle is lost"
            )
        check_can_mark(module, repr(name))
    for name, module in chosen.items():
        settings = (policy, name or type(module).__name__, escapes)
        mark(module).region = functools.partial(run_in_region, settings)
        log.info("%s (%s) is a region", name or "the model", type(module).__name__)
    asked = modules_are_asked_for(policy._compiled)
    if policy._compiled.asks_for_modules():
        warn_of_modules(policy.rules, names_of(model))
    return RegionHandle(chosen, number_modules(model) if asked else [])
