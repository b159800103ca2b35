"""Regions: where ops are intercepted."""

from __future__ import annotations

import functools
import inspect
import logging
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.compiler import is_dynamo_compiling
from torch.utils._pytree import tree_leaves

from ebb import _C
from ebb import policies as _policies
from ebb._policy.idle_rules import warn_of_modules, warn_of_no_root
from ebb._policy.policy import Policy
from ebb._region import offload_twice, tracing
from ebb._region.module_names import names_of
from ebb._region.modules import modules_are_asked_for, number_modules_once
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
        f"ebb: policy must be an ebb.Policy, such as ebb.policies.save_matmuls; "
        f"got {shown(policy)} of type {type(policy).__name__}"
    )


@functools.cache
def _warn_hooks_disabled() -> None:
    reason = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message() or ""
    warnings.warn(
        f"ebb: saved-tensor hooks are disabled here ({reason.strip()}), so this region passes "
        "through: gradients are right, no memory is saved. Shown once.",
        stacklevel=4,
    )


class _TracedRegion:
    """What Dynamo traces in place of a region: it cannot look into C++."""

    def __init__(self, *_: Any, **__: Any) -> None:
        tracing.region_is_traced()

    def __enter__(self) -> _TracedRegion:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def returns(self, *_: Any) -> None:
        pass

    def __call__(self, function: F) -> F:
        return function


class region(_C.Region):
    """A region: inside it, ebb decides op by op what stays in memory until backward.

    A context manager and a decorator. Regions nest: the outermost is the boundary of
    recomputation, inner ones change the policy and the name. They belong to the thread that
    enters them. Where saved-tensor hooks are disabled (``torch.func`` transforms) a region saves
    nothing and warns once. In a region that is traced (``torch.compile``, ``torch.export``,
    ``make_fx``, ``torch.jit.trace``) the tracer decides by itself what is kept, and a warning says
    so once.

    Args:
        policy: what happens to each op's outputs; default ``ebb.policies.recompute_all``.
        name: for messages and ``ebb.stats()``; default ``"region"``, or a decorated function's
            qualified name.
        escapes: what becomes of tensors that the region can recompute and that somebody else still
            references when it ends: a module's attribute, a field of a ``ctx``. ``"keep"``: they
            keep their memory (``bytes_escaped`` in ``ebb.stats()``). ``"placeholder"``: their
            memory is given up, and they show their data again in the region's backward; who reads
            them meanwhile gets a ``RuntimeError`` with the remedy. What the region returns stays:
            what a decorated function returns; in a with-block what :meth:`returns` names and what
            no op of the region has read. Of nested regions the outermost decides.
        root: the model that runs inside, for rules that ask for modules: they see the names in it,
            as they are when a region is first given it.

    Raises:
        TypeError: the policy, the name or the root has the wrong type.
        ValueError: ``escapes`` is neither of the two.
        RuntimeError: it is entered while it is open, left while it is not, left in another thread,
            or left before the regions inside it; it is entered, its policy offloads, and somebody
            else offloads too. Later regions work all the same.

    Example:
        >>> @ebb.region(ebb.policies.save_matmuls)
        ... def block(x, w):
        ...     return torch.relu(x @ w)
        >>> w = torch.ones(3, 3, requires_grad=True)
        >>> block(torch.ones(2, 3), w).sum().backward()
    """

    __slots__ = ("_escapes", "_name", "_policy", "_results")
    _repeats = False  # True: all operators outside aten may be run again

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
        if name is not None and not isinstance(name, str):
            raise TypeError(f"ebb: name must be a str; got {type(name).__name__}")
        if escapes not in _ESCAPES:
            raise ValueError(f"ebb: escapes must be 'keep' or 'placeholder'; got {shown(escapes)}")
        checked = _check_policy(policy)
        if root is not None:
            if not isinstance(root, torch.nn.Module):
                raise TypeError(f"ebb: root must be a module; got {type(root).__name__}")
            if modules_are_asked_for(checked._compiled):
                number_modules_once(root)
                if root not in checked._roots:  # looking at all its modules takes time
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
            escapes != "keep",
            log.isEnabledFor(logging.DEBUG),
            self._repeats,
        )

    # Entering and leaving are C++, see Note [Scopes that are left for sure]; it calls these.

    def _is_traced(self) -> bool:
        if tracing.makes_a_graph():
            tracing.region_is_traced()
            return True
        return tracing.is_fake()

    def _refuse_to_offload_twice(self) -> None:
        offload_twice.refuse(self._name or "region")

    def _warn_hooks_disabled(self) -> None:
        _warn_hooks_disabled()

    def _take_results(self) -> tuple[list[torch.Tensor], bool, list[torch.Tensor]]:
        """Whose memory stays, whether that was named, and which tensors have a backward."""
        results, self._results = self._results, None
        plain = [tensor for result in results or () for tensor in plain_tensors(result)]
        differentiable = [t for t in results or () if t.requires_grad and not t.is_leaf]
        return plain, results is not None, differentiable

    def _refill_before_backward(
        self, escapes: _C.Escapes, differentiable: list[torch.Tensor]
    ) -> None:
        def refill(_gradients: tuple[torch.Tensor | None, ...]) -> None:
            escapes.refill()

        # After all hooks on the results' gradients: one of them may gather parameters (FSDP's).
        for function in {result.grad_fn for result in differentiable}:
            if function is not None:
                function.register_prehook(refill)

    def _log_left(self) -> None:
        name = self._name or "region"
        log.debug("left region %s; in this step: %s", name, _C.stats()["regions"][name])

    def returns(self, *results: Any) -> None:
        """Name what the region returns, for ``escapes="placeholder"``: it keeps its memory.

        Args:
            results: tensors, or containers of tensors (see ``torch.utils._pytree``).

        Raises:
            RuntimeError: the region is not entered.

        Example:
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
            raise TypeError(f"ebb: a region decorates a function; got {type(function).__name__}")
        if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
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


class checkpointed(region):
    """A region for a checkpointed call: operators outside aten are recomputed in it too."""

    __slots__ = ()
    _repeats = True


def name_of(function: Any) -> str:
    """What a region around a call of `function` is called."""
    while isinstance(function, functools.partial):
        function = function.args[0] if function.args and _is_method(function) else function.func
    owner = getattr(function, "__self__", None)
    if isinstance(owner, torch.nn.Module):
        return type(owner).__name__
    return str(getattr(function, "__qualname__", type(function).__name__))


def _is_method(function: functools.partial[Any]) -> bool:
    """partial(forward, module): the module's name tells more."""
    return isinstance(function.args[0], torch.nn.Module)


def run_in_region(
    settings: tuple[Policy | None, str | None, str],
    function: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Call a function in a region of these settings, whose results it returns."""
    policy, name, escapes = settings
    if is_dynamo_compiling():
        tracing.region_is_traced()
        return function(*args, **kwargs)
    with region(policy, name, escapes=escapes) as entered:
        results = function(*args, **kwargs)
        entered.returns(results)
        return results
