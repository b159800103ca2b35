"""Wraps a module's forward without changing the model's code.

A module that is a region, or whose name rules match, gets a subclass of its class, as in torch's
parametrizations and FSDP2. Copies of the module (``copy.copy``, replicas of DataParallel) keep the
subclass; an attribute bound to one instance would be lost.
"""

from __future__ import annotations

import copy
import copyreg
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any

import torch
from torch.compiler import is_compiling
from torch.nn.modules.lazy import LazyModuleMixin

from ebb import _C
from ebb._region import in_graph
from ebb._region.module_names import modules_of
from ebb._region.tracing import is_optimized_module
from ebb._support.shown import as_utf8

_KEY = "_ebb"  # in a module's instance dictionary: its Marks


@dataclass
class Marks:
    """How ebb wraps one module's forward."""

    region: Callable[..., Any] | None = None  # calls a function in a region; None: no region
    number: int = 0  # number of the module's name, for rules with module=; 0: not needed
    names: str = ""  # the names with that number, in lines; for compiled graphs
    asked_by: int = 0  # how many calls of `number_modules` need the number
    is_root: bool = False  # True after `number_modules_once` for this module

    def __deepcopy__(self, memo: dict[int, Any]) -> Marks:
        return replace(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(None), ())  # a pickle loads where ebb is not installed

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.region is not None:
            function = functools.partial(self.region, function)
        if self.number == 0:
            return function(*args, **kwargs)
        if is_compiling():
            with torch.fx.traceback.annotate({in_graph.MODULE: self.names}):
                return function(*args, **kwargs)
        with _C.RunningModule(self.number):
            return function(*args, **kwargs)


class _NoSubclass:
    """Follows ebb's subclass in the method resolution order while the subclass is made, so that the
    original class's __init_subclass__ does not see the subclass. It is not a base: CPython would
    compare its layout with that of the original's first base, and refuse to set the class of a
    module such as ``Layer(abc.ABC, nn.Module)``.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        pass


class _Forward:
    """The forward of ebb's subclass: a module gets the forward that applies its marks, the class
    the original one, which transformers' layers read to check that their checkpointing is the
    outermost wrapper. A subclass created later (FSDP2's) inherits the forward that applies the
    marks."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __get__(self, module: torch.nn.Module | None, kind: type[torch.nn.Module]) -> Any:
        if module is not None:
            # Dynamo can trace the construction of a partial, but not of a method.
            bind: Any = functools.partial if is_compiling() else MethodType
            return bind(self.function, module)
        return kind._ebb_original.forward if "_ebb_original" in kind.__dict__ else self.function  # type: ignore[attr-defined]


# Note [Copies of marked modules]
# Another thread may run the module, or copy it, during a copy. So ebb copies and pickles a module
# without a change to the module: ebb asks the original class for what pickle and copy need, names
# the original class there, and gives the copy its marks at the end.


def _reduced(original: type[torch.nn.Module], module: torch.nn.Module, protocol: Any) -> Any:
    """What `module.__reduce_ex__` returns if `module` is of its original class and has no marks."""
    reduced = original.__reduce_ex__(module, protocol)
    if not isinstance(reduced, tuple):
        return reduced

    def unmarked(value: Any) -> Any:
        is_ours = isinstance(value, type) and value.__dict__.get("_ebb_original") is original
        return original if is_ours else value

    make, arguments, *rest = reduced
    if rest:
        rest[0] = _without_marks(rest[0])
    return (unmarked(make), tuple(map(unmarked, arguments)), *rest)


def _without_marks(state: Any) -> Any:
    """The state of a module, or a tuple of the state and the values of slots."""
    if isinstance(state, dict) and _KEY in state:
        state = state.copy()
        state.pop(_KEY, None)
        return state
    if isinstance(state, tuple):
        return tuple(map(_without_marks, state))
    return state


def _copied(
    original: type[torch.nn.Module],
    module: torch.nn.Module,
    copier: Callable[[], Any] | None,
    memo: dict[int, Any] | None,
) -> Any:
    """A copy, deep if there is a memo. `copier` is the module's own way to copy."""
    marks = module.__dict__.get(_KEY)
    if copier is not None:
        twin = copier()
    else:
        registered = copyreg.dispatch_table.get(original)
        reduced = registered(module) if registered else _reduced(original, module, 4)
        if isinstance(reduced, str):
            return module
        twin = copy._reconstruct(module, memo, *reduced)  # type: ignore[attr-defined]
    if marks is None or not isinstance(twin, torch.nn.Module) or twin is module:
        return twin
    if not hasattr(type(twin), "_ebb_original"):
        twin.__class__ = _marked_class(type(twin))  # type: ignore[arg-type]
    if twin.__dict__.get(_KEY, marks) is marks:
        twin.__dict__[_KEY] = replace(marks)
    return twin


def _reduce_subclass(module: Any, protocol: Any) -> Any:
    swapped = next(kind for kind in type(module).__mro__ if "_ebb_original" in kind.__dict__)
    reduced = super(swapped, module).__reduce_ex__(protocol)  # type: ignore[arg-type]
    if isinstance(reduced, tuple) and len(reduced) > 2 and isinstance(reduced[2], dict):
        state = dict(reduced[2])
        if _KEY in state:
            state[_KEY] = replace(state[_KEY])
        reduced = (*reduced[:2], state, *reduced[3:])
    return reduced


def _reduce(module: Any, protocol: Any) -> Any:
    """Pickles a model with its original class, so that it loads where ebb is not installed."""
    if "_ebb_original" not in type(module).__dict__:  # a later subclass of ebb's subclass
        return _reduce_subclass(module, protocol)
    reduced = _reduced(type(module)._ebb_original, module, protocol)
    if isinstance(reduced, tuple) and reduced[0] is copyreg.__newobj__:  # type: ignore[attr-defined]
        # pickle would compare the class in `reduced` with the module's
        make = copyreg._reconstructor  # type: ignore[attr-defined]
        return (make, (reduced[1][0], object, None), *reduced[2:])
    return reduced


@functools.cache
def _marked_class(original: type[torch.nn.Module]) -> type[torch.nn.Module]:
    def forward(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        inner = super(swapped, self).forward
        marks = self.__dict__.get(_KEY)
        return inner(*args, **kwargs) if marks is None else marks.run(inner, *args, **kwargs)

    made: list[type] = []

    # torch's parametrizations and fx, and users, set attributes on a module's class. The next two
    # functions set and delete such attributes on the original class.
    def set_attribute(cls: type, name: str, value: Any) -> None:
        setattr(original, name, value) if cls in made else type.__setattr__(cls, name, value)

    def delete_attribute(cls: type, name: str) -> None:
        delattr(original, name) if cls in made else type.__delattr__(cls, name)

    def order(cls: type) -> list[type]:
        found: list[type] = super(metaclass, cls).mro()  # type: ignore[arg-type]
        return found if made else [cls, _NoSubclass, *found[1:]]

    kind = type(original)
    methods = {"__setattr__": set_attribute, "__delattr__": delete_attribute, "mro": order}
    metaclass = type(kind.__name__, (kind,), methods)
    wrapped = original.forward if inspect.isfunction(original.forward) else None
    if wrapped is not None:
        functools.update_wrapper(forward, wrapped)
    # torch.fx's GraphModule.recompile sets this attribute unless the module's class itself has it.
    own = {name: vars(original)[name] for name in ("_wrapped_call",) if name in vars(original)}
    swapped = metaclass(
        original.__name__,
        (original,),
        {
            "__module__": original.__module__,
            "__qualname__": original.__qualname__,
            "__doc__": original.__doc__,
            "__reduce_ex__": _reduce,
            "forward": _Forward(forward),
            "_ebb_original": original,
            **own,
        },
    )
    made.append(swapped)
    type.__setattr__(swapped, "__bases__", (original,))  # orders again, without _NoSubclass

    # Functions for copy's tables and not __copy__ and __deepcopy__, because a wrapper that forwards
    # attribute access would seem to have these methods.
    def copied(module: torch.nn.Module) -> Any:
        copier = getattr(original, "__copy__", None)
        return _copied(original, module, copier and (lambda: copier(module)), None)

    def deep_copied(module: torch.nn.Module, memo: dict[int, Any]) -> Any:
        copier = getattr(module, "__deepcopy__", None)
        return _copied(original, module, copier and (lambda: copier(memo)), memo)

    copy._deepcopy_dispatch[swapped] = deep_copied  # type: ignore[attr-defined]
    copy._copy_dispatch[swapped] = copied  # type: ignore[attr-defined]
    return swapped  # type: ignore[no-any-return]


class _MarkedForward:
    """Wraps a `forward` that was set on one instance."""

    def __init__(self, wrapped: Any, marks: Marks) -> None:
        self.__wrapped__ = wrapped
        self.marks = marks

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.marks.run(self.__wrapped__, *args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return (copy.copy, (self.__wrapped__,))

    def __deepcopy__(self, memo: dict[int, Any]) -> _MarkedForward:
        return _MarkedForward(copy.deepcopy(self.__wrapped__, memo), replace(self.marks))


def marks_of(module: torch.nn.Module) -> Marks | None:
    """The `Marks` of a module; None if ebb does not wrap its forward."""
    own = module.__dict__.get("forward")
    return own.marks if isinstance(own, _MarkedForward) else module.__dict__.get(_KEY)


def mark(module: torch.nn.Module) -> Marks:
    """A module's marks; adds them if the module has none."""
    marks = marks_of(module)
    if marks is not None:
        return marks
    check_can_mark(module, type(module).__name__)
    marks = Marks()
    own = module.__dict__.get("forward")
    if own is not None:
        module.__dict__["forward"] = _MarkedForward(own, marks)
    else:
        module.__dict__[_KEY] = marks
        module.__class__ = _marked_class(type(module))  # type: ignore[arg-type]
    return marks


def can_mark(module: torch.nn.Module) -> bool:
    """False for a lazy module before its first forward, which replaces its class."""
    return not (isinstance(module, LazyModuleMixin) and module.has_uninitialized_params())


def check_can_mark(module: torch.nn.Module, name: str) -> None:
    """Raises ValueError if `module`, which messages call `name`, cannot be marked."""
    if not can_mark(module):
        raise ValueError(
            f"ebb: {name} is a lazy module with uninitialized parameters; run one forward before "
            "it becomes a region"
        )


def unmark_if_unused(module: torch.nn.Module) -> None:
    """Removes marks that nothing needs any more, unless other code has wrapped ebb's wrapper."""
    marks = marks_of(module)
    if marks is None or marks.region is not None or marks.number or not can_unmark(module):
        return
    own = module.__dict__.get("forward")
    if isinstance(own, _MarkedForward):
        module.__dict__["forward"] = own.__wrapped__
    else:
        module.__class__ = type(module)._ebb_original  # type: ignore[attr-defined]
        del module.__dict__[_KEY]


def can_unmark(module: torch.nn.Module) -> bool:
    """True if ebb's wrapper is still the outermost one."""
    if isinstance(module.__dict__.get("forward"), _MarkedForward):
        return True
    return "_ebb_original" in type(module).__dict__ and "forward" not in module.__dict__


def modules_are_asked_for(policy: Any) -> bool:
    """True if a compiled policy's rules, or reports, need the names of modules."""
    reports = "report" in _C.plugins and _C.is_reporting()
    return bool(policy.asks_for_modules()) or reports


def number_modules_once(root: torch.nn.Module) -> None:
    """Calls `number_modules` unless that was done for this root."""
    marks = marks_of(root)
    if marks is None or not marks.is_root:
        number_modules(root)
        mark(root).is_root = True


def number_modules(root: torch.nn.Module) -> list[torch.nn.Module]:
    """Numbers the modules that `root` has now by their names in it, for rules with ``module=`` and
    for reports. Returns the modules, for `unnumber`."""
    numbered = []
    for full, plain, module in modules_of(root):
        is_unmarkable = isinstance(module, torch.jit.ScriptModule) or is_optimized_module(module)
        if not is_unmarkable and can_mark(module):
            marks = mark(module)
            marks.number = _C.module_number(as_utf8(plain), as_utf8(full))
            marks.names = "\n".join(dict.fromkeys((plain, full)))
            marks.asked_by += 1
            numbered.append(module)
    return numbered


def unnumber(modules: list[torch.nn.Module]) -> None:
    """Undoes `number_modules`. Modules that another call has numbered keep their number. If other
    code has wrapped ebb's wrapper, the module keeps its class."""
    for module in modules:
        if marks := marks_of(module):
            marks.asked_by -= 1
            if marks.asked_by == 0:
                marks.number = 0
                unmark_if_unused(module)
