"""Regions, in which ebb intercepts ops."""

from __future__ import annotations

import functools
import inspect
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch.compiler import is_dynamo_compiling
from torch.utils._pytree import tree_leaves

from ebb import _C
from ebb import policies as _policies
from ebb._policy.idle_rules import warn_of_modules, warn_of_no_root
from ebb._policy.policy import Policy
from ebb._region import in_graph, outer_hooks, tracing, unseen_writes
from ebb._region.disable import is_switched_off
from ebb._region.module_names import names_of
from ebb._region.modules import modules_are_asked_for, number_modules_once
from ebb._support import deferred
from ebb._support.log import log
from ebb._support.shown import as_utf8, shown
from ebb._support.subclasses import plain_tensors

F = TypeVar("F", bound=Callable[..., Any])

_ESCAPES = ("keep", "placeholder")


def _check_policy(policy: object) -> Policy:
    if policy is None:
        return _policies.recompute_all
    if isinstance(policy, Policy):
        return policy
    raise TypeError(
        "ebb: policy must be an ebb.Policy, such as ebb.policies.save_matmuls or "
        "ebb.Policy.parse('save_matmuls'); "
        f"got {shown(policy)} of type {type(policy).__name__}"
    )


def check_escapes(escapes: object) -> None:
    if escapes not in _ESCAPES:
        raise ValueError(f"ebb: escapes must be 'keep' or 'placeholder'; got {shown(escapes)}")


def leaving(escapes: str) -> Callable[..., _C.Escapes | None] | None:
    """The function of C++ that leaves such a region; None if it is left as usual.

    Raises:
        AttributeError: ebb was built without the plug-in ``escapes``.
    """
    return None if escapes == "keep" else _C.leave_emptying_escapes


def _check_region(name: object, escapes: object, root: object) -> None:
    if name is not None and not isinstance(name, str):
        raise TypeError(f"ebb: name must be a str; got {type(name).__name__}")
    check_escapes(escapes)
    if root is not None and not isinstance(root, torch.nn.Module):
        raise TypeError(f"ebb: root must be a torch.nn.Module; got {type(root).__name__}")


class _TracedRegion:
    """Stands for a region while Dynamo traces, because Dynamo cannot trace C++."""

    def __init__(
        self,
        policy: Policy | None = None,
        name: str | None = None,
        *,
        escapes: str = "keep",
        root: torch.nn.Module | None = None,
    ) -> None:
        _check_region(name, escapes, root)
        self._settings = policy, name, escapes

    def __enter__(self) -> _TracedRegion:
        policy, name, _ = self._settings
        self._context = _annotated(policy, name)
        self._context.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._context.__exit__(None, None, None)

    def returns(self, *_: Any) -> None:
        pass

    def __call__(self, function: F) -> F:
        return functools.partial(run_in_region, self._settings, function)  # type: ignore[return-value]


@contextmanager
def _annotated(policy: Policy | None, name: str | None) -> Iterator[None]:
    """Marks the operators that Dynamo traces inside as those of a region."""
    number = _check_policy(policy)._number
    annotation = {in_graph.REGION: in_graph.enter(number, name or "region")}
    with torch.fx.traceback.annotate(annotation):
        yield


class region(_C.Region):
    """A region of code, in which ebb decides for each op what stays in memory until backward.

    A context manager and a decorator. Regions nest: backward recomputes the outermost region as a
    unit; inner regions change the policy, and the region name in messages and statistics. A region
    belongs to the thread that enters it. Where saved-tensor hooks are disabled (``torch.func``
    transforms), a region frees no memory and warns once. So does a region that is traced
    (``torch.export``, ``make_fx``, ``torch.jit.trace``). Under ``torch.compile`` the compiler saves
    and recomputes what the policy says; see docs/guide/compile.md.

    Args:
        policy: what happens to each op's outputs; default ``ebb.policies.recompute_all``.
        name: for messages and ``ebb.stats()``; default ``"region"``, or a decorated function's
            qualified name.
        escapes: what happens to recomputable tensors that the program still references when the
            region ends, such as a module's attribute or a field of a ``ctx``. ``"keep"``: they
            keep their memory (``bytes_escaped`` in ``ebb.stats()``). ``"placeholder"``: their
            memory is freed, and the region's backward restores their data; a read before that
            raises a ``RuntimeError`` that names the remedy. The region's results keep their memory:
            the return values of a decorated function; in a with-block the tensors that
            ``returns`` names and those that no op of the region has read. The outermost of
            nested regions decides.
        root: the model that runs inside, for rules with ``module=``. Such rules see the names of
            the model's modules at the time when a region is first given this root.

    Raises:
        TypeError: the policy, the name or the root has the wrong type.
        ValueError: ``escapes`` is neither of the two.
        RuntimeError: the region is entered while it is open, left while it is not, left in another
            thread, or left before the regions inside it; or the policy offloads, and another
            library offloads the region's tensors too. Later regions still work.

    Examples:
        >>> @ebb.region(ebb.policies.save_matmuls)
        ... def block(x, w):
        ...     return torch.relu(x @ w)
        >>> w = torch.ones(3, 3, requires_grad=True)
        >>> block(torch.ones(2, 3), w).sum().backward()
    """

    __slots__ = ("_escapes", "_name", "_policy", "_results")
    _repeats = False  # True: operators outside aten are recomputed too

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return _TracedRegion(*args, **kwargs) if is_dynamo_compiling() else super().__new__(cls)

    def __init__(
        self,
        policy: Policy | None = None,
        name: str | None = None,
        *,
        escapes: str = "keep",
        root: torch.nn.Module | None = None,
    ) -> None:
        _check_region(name, escapes, root)
        if deferred.waiting:
            deferred.run()
        if not (unseen_writes.are_watched() or is_switched_off()):
            unseen_writes.install()
        checked = _check_policy(policy)
        if root is not None:
            if modules_are_asked_for(checked._compiled):
                number_modules_once(root)
                if root not in checked._roots:  # walking all its modules takes time
                    checked._roots.add(root)
                    warn_of_modules(checked.rules, names_of(root))
        elif checked._compiled.asks_for_modules() and not _C.any_module_has_number():
            warn_of_no_root()
        self._escapes = escapes
        self._results: list[torch.Tensor] | None = None
        self._policy = policy
        self._name = as_utf8(name) if name else None
        self._configure(
            checked._compiled,
            self._name or "region",
            checked._offloads,
            leaving(escapes),
            log.isEnabledFor(logging.DEBUG),
            self._repeats,
        )

    # C++ enters and leaves regions, see Note [Scopes that are left for sure], and calls these.

    def _is_traced(self) -> bool:
        if tracing.makes_a_graph():
            tracing.region_is_traced()
            return True
        return tracing.is_fake()

    def _refuse_to_offload_twice(self) -> None:
        outer_hooks.refuse_to_offload_twice(self._name or "region")

    @staticmethod
    @functools.cache
    def _warn_hooks_disabled() -> None:
        reason = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message() or ""
        warnings.warn(
            "ebb: regions have no effect here, because saved-tensor hooks are disabled "
            f"({reason.strip()}). Gradients are correct, but no memory is freed. Shown once.",
            stacklevel=3,
        )

    def _take_results(self) -> tuple[list[torch.Tensor], bool, list[torch.Tensor]]:
        """The plain tensors that ``returns`` named; True if it was called; the results that
        have a backward."""
        results, self._results = self._results, None
        plain = [tensor for result in results or () for tensor in plain_tensors(result)]
        differentiable = [t for t in results or () if t.requires_grad and not t.is_leaf]
        return plain, results is not None, differentiable

    def _refill_before_backward(
        self, escapes: _C.Escapes, differentiable: list[torch.Tensor]
    ) -> None:
        def refill(_gradients: tuple[torch.Tensor | None, ...]) -> None:
            escapes.refill()

        # Runs after all hooks on the results' gradients, because FSDP's hook gathers parameters.
        for function in {result.grad_fn for result in differentiable}:
            if function is not None:
                function.register_prehook(refill)

    def _log_left(self) -> None:
        name = self._name or "region"
        log.debug("left region %s; in this step: %s", name, _C.stats()["regions"][name])

    def returns(self, *results: Any) -> None:
        """Name the region's results. They keep their memory under ``escapes="placeholder"``.

        Args:
            results: tensors, or containers of tensors (see ``torch.utils._pytree``).

        Raises:
            RuntimeError: the region is not entered.

        Examples:
            >>> with ebb.region(escapes="placeholder") as region:
            ...     y = torch.ones(3, requires_grad=True).sin().cos()
            ...     region.returns(y)
        """
        if not self._is_open():
            raise RuntimeError(
                f"ebb: region {self._name or 'region'!r} is not entered; call returns() inside it"
            )
        if self._escapes == "keep":
            return
        tensors = [leaf for leaf in tree_leaves(results) if isinstance(leaf, torch.Tensor)]
        self._results = (self._results or []) + tensors

    def __call__(self, function: F) -> F:
        if not callable(function):
            raise TypeError(
                f"ebb: a region can decorate only a callable; got {type(function).__name__}"
            )
        if _runs_after_the_call(function):
            raise TypeError(
                "ebb: a region cannot decorate a generator or a coroutine, whose body runs after "
                "the call; enter the region inside it"
            )
        policy, escapes = self._policy, self._escapes
        name = self._name or getattr(function, "__qualname__", type(function).__name__)

        @functools.wraps(function)
        def inside(*args: Any, **kwargs: Any) -> Any:
            return run_in_region((policy, name, escapes), function, *args, **kwargs)

        return inside  # type: ignore[return-value]


def _runs_after_the_call(function: Callable[..., Any]) -> bool:
    """True if a call only returns an object that runs the body: a generator or a coroutine."""
    called = type(function).__call__  # of an object that is no function
    kinds = inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction
    return any(kind(function) or kind(called) for kind in kinds)


class checkpointed(region):
    """A region for a checkpointed call, in which operators outside aten are recomputed too."""

    __slots__ = ()
    _repeats = True


def name_of(function: Any) -> str:
    """The name of a region around a call of `function`."""
    while isinstance(function, functools.partial):
        first = function.args[0] if function.args else None
        is_method = isinstance(first, torch.nn.Module)  # partial(forward, module)
        function = first if is_method else function.func
    owner = getattr(function, "__self__", None)
    if isinstance(owner, torch.nn.Module):
        return type(owner).__name__
    return str(getattr(function, "__qualname__", type(function).__name__))


def run_in_region(
    settings: tuple[Policy | None, str | None, str],
    function: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Call a function in a region with these settings, and return its results."""
    policy, name, escapes = settings
    if is_dynamo_compiling():
        with _annotated(policy, name):
            return function(*args, **kwargs)
    with region(policy, name, escapes=escapes) as entered:
        results = function(*args, **kwargs)
        entered.returns(results)
        return results
