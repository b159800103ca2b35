"""Making a model's modules regions, without touching their code."""

from __future__ import annotations

import copy
import types
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any

import torch

from ebb._policy import Policy
from ebb._region import _check_policy, region


class _RegionForward:
    """Stands as `forward` in a module's instance dictionary and runs the real one in a region."""

    def __init__(
        self, module: torch.nn.Module, policy: Policy, name: str, before: Any | None
    ) -> None:
        self.module = module
        self.policy = policy
        self.name = name
        self.before = before  # an instance's own `forward` that was there, or None

    @property
    def wrapped(self) -> Any:
        if self.before is not None:
            return self.before
        return types.MethodType(type(self.module).forward, self.module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with region(self.policy, self.name):
            return self.wrapped(*args, **kwargs)

    def __getattr__(self, attribute: str) -> Any:
        # Signature inspection (inspect.signature, transformers) sees the real forward.
        if attribute == "__wrapped__" and "module" in self.__dict__:
            return self.wrapped
        raise AttributeError(attribute)

    def __deepcopy__(self, memo: dict[int, Any]) -> _RegionForward:
        module = copy.deepcopy(self.module, memo)
        return _RegionForward(module, self.policy, self.name, copy.deepcopy(self.before, memo))

    def __reduce__(self) -> tuple[Any, ...]:
        # A pickled model carries its real forward, so it loads where ebb is not installed.
        if self.before is None:
            return (getattr, (self.module, "forward"))
        return (copy.copy, (self.before,))


class RegionHandle:
    """What :func:`apply` returns.

    Attributes:
        names: the fully qualified names of the modules that became regions.
    """

    def __init__(self, forwards: dict[str, _RegionForward]) -> None:
        self._forwards: dict[str, _RegionForward] | None = forwards
        self.names = tuple(forwards)

    def remove(self) -> None:
        """Give the modules their own `forward` back.

        Raises:
            RuntimeError: it was called before, or somebody has wrapped a module's `forward` since
                (remove that wrapper first); nothing is changed then.
        """
        if self._forwards is None:
            raise RuntimeError("ebb: remove() was called already on this handle")
        for name, forward in self._forwards.items():
            if forward.module.__dict__.get("forward") is not forward:
                raise RuntimeError(
                    f"ebb: the forward of module {name!r} was replaced after ebb.apply; undo that "
                    "replacement before calling remove()"
                )
        for forward in self._forwards.values():
            del forward.module.__dict__["forward"]
            if forward.before is not None:
                forward.module.__dict__["forward"] = forward.before
        self._forwards = None

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
) -> RegionHandle:
    """Make the forward of each matching module a region.

    The model's state_dict, parameters and hooks stay as they are; copies (``copy.deepcopy``) are
    regions too, pickles carry the plain forward.

    Args:
        model: the model to change in place.
        policy: what happens to each op's outputs; default ``ebb.policies.recompute_all``.
        modules: glob, or several, over fully qualified names as ``model.named_modules()`` gives
            them; ``*`` matches dots too. Of nested matches the outermost counts. The default, the
            empty name, is the model itself.

    Returns:
        A handle whose ``remove()`` undoes it; it is also a context manager.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: no module matches, or a matching one is a region already; nothing is changed.

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
        if isinstance(module.__dict__.get("forward"), _RegionForward):
            raise ValueError(f"ebb: module {name!r} is a region already; remove() that first")
    forwards = {}
    for name, module in chosen.items():
        forward = _RegionForward(
            module, policy, name or type(module).__name__, module.__dict__.get("forward")
        )
        module.__dict__["forward"] = forward
        forwards[name] = forward
    return RegionHandle(forwards)
