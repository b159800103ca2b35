"""Making a model's modules regions, without touching their code."""

from __future__ import annotations

import copy
import copyreg
import functools
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any

import torch

from ebb._policy import Policy
from ebb._region import _check_policy, region

_KEY = "_ebb_region"  # in a module's instance dictionary: (policy, name, escapes)


def _in_region(settings: tuple[Policy, str, str], function: Any, *args: Any, **kwargs: Any) -> Any:
    policy, name, escapes = settings
    with region(policy, name, escapes=escapes) as entered:
        results = function(*args, **kwargs)
        if escapes != "keep":
            entered.returns(results)
        return results


@functools.cache
def _region_class(original: type[torch.nn.Module]) -> type[torch.nn.Module]:
    """A subclass of a module class whose forward runs in a region.

    Swapping the class, as torch's own parametrizations and FSDP2 do, follows copies of a module
    (``copy.copy``, replicas of DataParallel), which an attribute bound to one instance would not.
    """

    def forward(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        return _in_region(self.__dict__[_KEY], original.forward, self, *args, **kwargs)

    def reduce(self: Any, protocol: Any) -> Any:
        # A pickled model is of its original class, so it loads where ebb is not installed.
        state = self.__getstate__() if hasattr(self, "__getstate__") else self.__dict__
        if isinstance(state, dict):
            state = {key: value for key, value in state.items() if key != _KEY}
        make = copyreg._reconstructor  # type: ignore[attr-defined]
        return (make, (original, object, None), state)

    def deepcopy(self: torch.nn.Module, memo: dict[int, Any]) -> torch.nn.Module:
        mark = self.__dict__.pop(_KEY)
        self.__class__ = original
        try:
            twin = copy.deepcopy(self, memo)
        finally:
            self.__class__ = swapped
            self.__dict__[_KEY] = mark
        twin.__class__ = swapped
        twin.__dict__[_KEY] = mark
        return twin

    swapped = type(
        original.__name__,
        (original,),
        {
            "__module__": original.__module__,
            "__qualname__": original.__qualname__,
            "__doc__": original.__doc__,
            "__reduce_ex__": reduce,
            "__deepcopy__": deepcopy,
            "forward": functools.wraps(original.forward)(forward),
            "_ebb_original": original,
        },
    )
    return swapped


class _RegionForward:
    """Wraps a `forward` that somebody put on one instance; it runs in a region."""

    def __init__(self, wrapped: Any, settings: tuple[Policy, str, str]) -> None:
        self.__wrapped__ = wrapped
        self.settings = settings

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _in_region(self.settings, self.__wrapped__, *args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return (copy.copy, (self.__wrapped__,))

    def __deepcopy__(self, memo: dict[int, Any]) -> _RegionForward:
        return _RegionForward(copy.deepcopy(self.__wrapped__, memo), self.settings)


def _is_region(module: torch.nn.Module) -> bool:
    return _KEY in module.__dict__ or isinstance(module.__dict__.get("forward"), _RegionForward)


def _make_region(module: torch.nn.Module, settings: tuple[Policy, str, str]) -> None:
    own = module.__dict__.get("forward")
    if own is not None:
        module.__dict__["forward"] = _RegionForward(own, settings)
        return
    module.__dict__[_KEY] = settings
    module.__class__ = _region_class(type(module))  # type: ignore[arg-type]


def _unmake_region(module: torch.nn.Module) -> None:
    own = module.__dict__.get("forward")
    if isinstance(own, _RegionForward):
        module.__dict__["forward"] = own.__wrapped__
        return
    module.__class__ = type(module)._ebb_original  # type: ignore[attr-defined]
    del module.__dict__[_KEY]


def _can_unmake(module: torch.nn.Module) -> bool:
    """Whether ebb's wrapper is still the outermost one."""
    if isinstance(module.__dict__.get("forward"), _RegionForward):
        return True
    return "_ebb_original" in type(module).__dict__ and "forward" not in module.__dict__


class RegionHandle:
    """What :func:`apply` returns.

    Attributes:
        names: the fully qualified names of the modules that became regions.
    """

    def __init__(self, modules: dict[str, torch.nn.Module]) -> None:
        self._modules: dict[str, torch.nn.Module] | None = modules
        self.names = tuple(modules)

    def remove(self) -> None:
        """Give the modules their own forward back.

        Raises:
            RuntimeError: it was called before, or somebody has wrapped a module's forward or class
                since (undo that first); nothing is changed then.
        """
        if self._modules is None:
            raise RuntimeError("ebb: remove() was called already on this handle")
        for name, module in self._modules.items():
            if not _can_unmake(module):
                raise RuntimeError(
                    f"ebb: the forward or class of module {name!r} was replaced after ebb.apply; "
                    "undo that before calling remove()"
                )
        for module in self._modules.values():
            _unmake_region(module)
        self._modules = None

    def __enter__(self) -> RegionHandle:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def _select(model: torch.nn.Module, patterns: tuple[str, ...]) -> dict[str, torch.nn.Module]:
    chosen: dict[str, torch.nn.Module] = {}
    for name, module in model.named_modules():
        inside_chosen = any(name.startswith(f"{outer}.") or outer == "" for outer in chosen)
        if not inside_chosen and any(fnmatchcase(name, pattern) for pattern in patterns):
            chosen[name] = module
    return chosen


def apply(
    model: torch.nn.Module,
    policy: Policy | None = None,
    modules: str | Iterable[str] = "",
    *,
    escapes: str = "keep",
) -> RegionHandle:
    """Make the forward of each matching module a region.

    The model's state_dict, parameters and hooks stay as they are. A matching module's class becomes
    a subclass of the same name, so ``isinstance`` still holds. Copies are regions too; a pickle
    holds the original class.

    Args:
        model: the model to change in place.
        policy: what happens to each op's outputs; default ``ebb.policies.recompute_all``.
        modules: glob, or several, over fully qualified names as ``model.named_modules()`` gives
            them; ``*`` matches dots too. Of nested matches the outermost counts. The default, the
            empty name, is the model itself.
        escapes: as for :class:`ebb.region`.

    Returns:
        A handle whose ``remove()`` undoes it; it is also a context manager.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: no module matches, a matching one is a region already, or ``escapes`` is
            unknown; nothing is changed.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
        >>> handle = ebb.apply(model, ebb.policies.recompute_all, modules="[01]")
        >>> handle.names
        ('0', '1')
        >>> handle.remove()
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"ebb: model must be a torch.nn.Module; got {type(model).__name__}")
    policy = _check_policy(policy)
    region(policy, escapes=escapes)  # checks the value
    patterns = (modules,) if isinstance(modules, str) else tuple(modules)
    if not all(isinstance(pattern, str) for pattern in patterns):
        raise TypeError("ebb: modules must be a string or an iterable of strings")
    chosen = _select(model, patterns)
    if not chosen:
        names = [name for name, _ in model.named_modules() if name]
        shown = ", ".join(names[:20]) + (f", ... ({len(names)} in all)" if len(names) > 20 else "")
        raise ValueError(
            f"ebb: no module matches {', '.join(patterns)!r}. The modules are: {shown}"
        )
    for name, module in chosen.items():
        if _is_region(module):
            raise ValueError(f"ebb: module {name!r} is a region already; remove() that first")
    for name, module in chosen.items():
        _make_region(module, (policy, name or type(module).__name__, escapes))
    return RegionHandle(chosen)
